// A box for long texts. (A growing text field measures itself at every change: half a million characters freeze the page for 20 s.)
// Python -> here: label, value, rows, limit, hint; message {ask: "submit"}. Here -> Python: value when the box is left; action = {seq, kind, ...}.
const CSS = `
.ct-prompt { position: relative; font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); }
.ct-prompt label { position: absolute; top: -8px; left: 10px; padding: 0 5px; font-size: 11.5px; background: var(--panel-surface-color);
  color: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-prompt textarea { display: block; width: 100%; box-sizing: border-box; resize: vertical; min-height: 3.2em; padding: 11px 13px; font: inherit; line-height: 1.5;
  color: inherit; background: transparent; border: 1px solid color-mix(in srgb, currentColor 26%, transparent); border-radius: 8px; }
.ct-prompt textarea:hover { border-color: currentColor; }
.ct-prompt textarea:focus { outline: 2px solid var(--panel-primary-color); outline-offset: -2px; }
.ct-prompt textarea:focus + label { color: var(--panel-primary-color); }
`;

let count = 0;

function render({ model, el }) {
  let seq = model.get("action")?.seq ?? 0;
  const root = document.createElement("div");
  root.className = "ct-prompt";
  const style = document.createElement("style");
  style.textContent = CSS;
  const box = document.createElement("textarea");
  box.id = `ct-prompt-${++count}`;
  box.rows = model.get("rows");
  box.value = model.get("value");
  box.spellcheck = false;
  box.title = model.get("hint");
  const label = document.createElement("label");
  label.htmlFor = box.id;
  label.textContent = model.get("label");
  root.append(box, label);
  el.append(style, root);

  const limit = model.get("limit");
  let kept = box.value;
  const tell = () => {
    if (box.value !== model.get("value")) {
      model.set("value", box.value);
      model.save_changes();
    }
  };
  const act = (kind, values = {}) => {
    model.set("action", { seq: ++seq, kind, ...values });
    model.save_changes();
  };
  // Refused before it is laid out: that alone would take the page seconds.
  box.addEventListener("paste", (event) => {
    const length = event.clipboardData?.getData("text/plain").length ?? 0;
    if (box.value.length + length <= limit) return;
    event.preventDefault();
    act("too_long", { length });
  });
  box.addEventListener("input", () => {
    if (box.value.length > limit) {
      const { length } = box.value;
      box.value = kept;
      act("too_long", { length });
    }
    kept = box.value;
  });
  box.addEventListener("change", tell);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    tell();
    act("submit", { text: box.value });
  });
  // Asked, rather than read from value: a server with several threads may see a click before the value that was sent before it.
  const onMessage = (message) => {
    if (message.ask !== "submit") return;
    tell();
    act("submit", { text: box.value });
  };
  model.on("msg:custom", onMessage);
  const onValue = () => {
    if (box.value !== model.get("value")) kept = box.value = model.get("value");
  };
  model.on("change:value", onValue);
  return () => {
    model.off("msg:custom", onMessage);
    model.off("change:value", onValue);
  };
}

export default { render };

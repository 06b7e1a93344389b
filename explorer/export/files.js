// Files in and out; see files.py. Python -> here: messages {taken} (go on), {save, mime, data}, {png}, {card}, {svg}, {link}.
// Here -> Python: action = {seq, kind: "piece", name, offset, data, last} or {seq, kind: "said", text}.
const FILES_CSS = `
.ct-open { font: 13px var(--bokeh-base-font, sans-serif); display: flex; flex-direction: column; gap: 4px; }
.ct-open button { font: inherit; color: var(--panel-primary-color); background: none; border: 1px solid color-mix(in srgb, currentColor 50%, transparent);
  border-radius: 8px; padding: 5px 12px; cursor: pointer; text-align: left; min-height: 32px; }
.ct-open button:hover { background: color-mix(in srgb, currentColor 8%, transparent); }
.ct-open button:focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-open output { color: var(--panel-on-surface-color); opacity: .75; font-size: 12px; } .ct-open output:empty { display: none; }
`;

function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

function render({ model, el }) {
  const texts = model.get("texts");
  let seq = model.get("action")?.seq ?? 0;
  const act = (fields) => {
    model.set("action", { seq: ++seq, ...fields });
    model.save_changes();
  };
  const said = (text) => act({ kind: "said", text });
  const box = document.createElement("div");
  box.className = "ct-open";
  const style = document.createElement("style");
  style.textContent = FILES_CSS;
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".cutaway";
  input.hidden = true;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = texts.open;
  button.title = texts.hint;
  button.addEventListener("click", () => input.click());
  const state = document.createElement("output");
  box.append(style, button, input, state);
  el.append(box);

  let sending = null; // {file, offset}
  const sendPiece = async () => {
    const { file, offset } = sending;
    const end = Math.min(file.size, offset + model.get("piece"));
    const data = toBase64(new Uint8Array(await file.slice(offset, end).arrayBuffer()));
    const last = end >= file.size;
    state.textContent = texts.reading.replace("{percent}", Math.round((100 * end) / Math.max(1, file.size)));
    if (last) { sending = null; setTimeout(() => { state.textContent = ""; }, 1500); }
    act({ kind: "piece", name: file.name, offset, data, last });
  };
  const goOn = (taken) => {
    if (!sending) return;
    sending.offset = taken;
    sendPiece();
  };
  input.addEventListener("change", () => {
    const file = input.files[0];
    input.value = "";
    if (!file) return;
    const limit = model.get("limit");
    if (file.size > limit) {
      const mib = (n) => (n / 2 ** 20).toFixed(1);
      said(texts.too_large.replace("{size}", mib(file.size)).replace("{limit}", mib(limit)));
      return;
    }
    sending = { file, offset: 0 };
    sendPiece();
  });

  // One card: outlined under the pointer, taken by a click; Escape gives up.
  const pick = (name) => {
    const frame = document.createElement("div");
    frame.style.cssText = "position:fixed;z-index:9999;pointer-events:none;border:3px solid #d55e00;border-radius:12px;display:none";
    document.body.append(frame);
    const cardOf = (event) => event.composedPath().find((node) => node.classList?.contains("ct-card"));
    const over = (event) => {
      const box = cardOf(event)?.getBoundingClientRect();
      frame.style.display = box ? "block" : "none";
      if (box) Object.assign(frame.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${box.width}px`, height: `${box.height}px` });
    };
    const end = () => {
      frame.remove();
      document.removeEventListener("pointermove", over, true);
      document.removeEventListener("click", chosen, true);
      document.removeEventListener("keydown", key, true);
    };
    const chosen = async (event) => {
      event.preventDefault();
      event.stopPropagation();
      const card = cardOf(event);
      end();
      try {
        if (card) saveBlob(await pagePicture(card), `${name}.png`);
      } catch (error) {
        said(texts.failed.replace("{error}", `${error?.message ?? error}`));
      }
    };
    const key = (event) => { if (event.key === "Escape") end(); };
    document.addEventListener("pointermove", over, true);
    document.addEventListener("click", chosen, true);
    document.addEventListener("keydown", key, true);
  };

  const onMessage = async (message) => {
    try {
      if ("taken" in message) goOn(message.taken);
      else if ("save" in message) saveBlob(new Blob([message.data], { type: message.mime }), message.save);
      else if ("png" in message) saveBlob(await pagePicture(deepFind("ct-page") ?? document.body), `${message.png}.png`);
      else if ("card" in message) pick(message.card);
      else if ("svg" in message) {
        const found = await figurePictures();
        if (!found.length) said(texts.no_figures);
        found.forEach((blob, i) => saveBlob(blob, `${message.svg}-${i + 1}.svg`));
      } else if ("link" in message) await navigator.clipboard.writeText(window.location.href);
    } catch (error) {
      said(texts.failed.replace("{error}", `${error?.message ?? error}`));
    }
  };
  model.on("msg:custom", onMessage);
  return () => model.off("msg:custom", onMessage);
}

export default { render };

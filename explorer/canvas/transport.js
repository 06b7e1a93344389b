// The transport bar: which step this browser looks at. One ESM file for Panel and for anywidget.
// Python -> here: first, last, step, live, playing, speed, past, texts. Here -> Python: action = {seq, kind, value}.

const ICONS = {
  back: "M6 5h2.4v14H6zM20 5v14L9.6 12z",
  step: "M15.6 5H18v14h-2.4zM4 5l10.4 7L4 19z",
  play: "M7 4.5v15L19.5 12z",
  pause: "M6.5 5h4v14h-4zM13.5 5h4v14h-4z",
};
const SPEEDS = [1, 2, 5, 10, 30, 100];
const CSS = `
.ct-transport { display: flex; align-items: center; gap: 6px; box-sizing: border-box; width: 100%; min-height: 46px; padding: 5px 12px;
  font: 13px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); background: var(--panel-surface-color);
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent); border-radius: 12px; }
.ct-transport button { font: inherit; color: inherit; background: none; border: 0; border-radius: 8px; height: 36px; min-width: 36px; padding: 0 8px;
  display: inline-flex; align-items: center; justify-content: center; gap: 6px; cursor: pointer; flex: none; }
.ct-transport button:hover:not(:disabled) { background: color-mix(in srgb, currentColor 8%, transparent); }
.ct-transport button:disabled { opacity: .35; cursor: default; }
.ct-transport :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-transport svg { width: 20px; height: 20px; fill: currentColor; }
.ct-transport input[type=range] { flex: 1 1 60px; min-width: 40px; height: 24px; margin: 0 4px; accent-color: var(--panel-primary-color); cursor: pointer; }
.ct-transport output { flex: none; min-width: 9.5em; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ct-transport .past { flex: none; font-size: 12px; padding: 1px 8px; border-radius: 99px; white-space: nowrap; cursor: help; border: 1px solid var(--past);
  background: color-mix(in srgb, var(--past) 18%, transparent); }
.ct-transport .past[hidden] { display: none; }
.ct-transport select { font: inherit; color: inherit; background: var(--panel-surface-color); border: 1px solid color-mix(in srgb, currentColor 22%, transparent);
  border-radius: 8px; height: 30px; flex: none; }
.ct-transport .live { border: 1px solid color-mix(in srgb, currentColor 22%, transparent); padding: 0 12px; height: 30px; }
.ct-transport .live i { width: 8px; height: 8px; border-radius: 50%; background: currentColor; opacity: .4; }
.ct-transport .live[aria-pressed=true] { color: var(--panel-primary-color); border-color: currentColor; }
.ct-transport .live[aria-pressed=true] i { opacity: 1; }
@media (max-width: 620px) {
  .ct-transport { flex-wrap: wrap; padding: 4px 6px; gap: 2px; }
  .ct-transport input[type=range] { order: 9; flex-basis: 90%; }
  .ct-transport output { flex: 1; min-width: 0; } .ct-transport select { display: none; }
}
`;

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.appendChild(document.createElementNS(svg.namespaceURI, "path")).setAttribute("d", path);
  return svg;
}

// Typing wins over shortcuts; so does a control that uses the key itself.
function takesKey(event) {
  const target = event.composedPath()[0];
  if (!(target instanceof Element)) return false;
  if (target.closest("input, textarea, select, [contenteditable=true], [role=slider], [role=listbox], [role=menu]")) return true;
  return event.key === " " && target.closest("button, a, summary, [role=button], [tabindex='0']") !== null;
}

function render({ model, el }) {
  const texts = model.get("texts");
  let seq = model.get("action")?.seq ?? 0; // a second drawing goes on counting, or its first action would look like no change
  const act = (kind, value = null) => {
    model.set("action", { seq: ++seq, kind, value });
    model.save_changes();
  };
  const button = (name, kind) => {
    const made = document.createElement("button");
    made.type = "button";
    made.append(icon(ICONS[name]));
    made.title = texts[name];
    made.setAttribute("aria-label", texts[name]);
    made.addEventListener("click", () => act(typeof kind === "function" ? kind() : kind));
    return made;
  };
  const toggle = () => (model.get("live") || model.get("playing") ? "pause" : "play");

  const bar = document.createElement("div");
  bar.className = "ct-transport";
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", texts.bar);
  const style = document.createElement("style");
  style.textContent = CSS;
  const back = button("back", "back");
  const play = button("play", toggle);
  const step = button("step", "step");
  const slider = document.createElement("input");
  slider.type = "range";
  slider.step = "1";
  slider.setAttribute("aria-label", texts.slider);
  slider.title = texts.slider;
  let dragging = false;
  slider.addEventListener("input", () => { dragging = true; act("goto", Number(slider.value)); });
  slider.addEventListener("change", () => { dragging = false; });
  const label = document.createElement("output");
  const past = document.createElement("span");
  past.className = "past";
  past.setAttribute("role", "status");
  const speed = document.createElement("select");
  speed.title = texts.speed;
  speed.setAttribute("aria-label", texts.speed);
  for (const value of SPEEDS) speed.add(new Option(value === 1 ? texts.one_per_second : texts.per_second.replace("{n}", value), value));
  speed.addEventListener("change", () => act("speed", Number(speed.value)));
  const live = document.createElement("button");
  live.type = "button";
  live.className = "live";
  live.title = texts.live;
  live.append(document.createElement("i"), texts.live_label);
  live.addEventListener("click", () => act("follow"));
  bar.append(back, play, step, slider, past, label, speed, live);
  el.append(style, bar);

  function draw() {
    const [first, last, isLive, playing] = ["first", "last", "live", "playing"].map((name) => model.get(name));
    const shown = isLive ? last : model.get("step");
    const moving = isLive || playing;
    play.replaceChildren(icon(moving ? ICONS.pause : ICONS.play));
    play.title = moving ? texts.pause : texts.play;
    play.setAttribute("aria-label", play.title);
    live.setAttribute("aria-pressed", String(isLive));
    slider.min = String(first);
    slider.max = String(Math.max(last, first));
    if (!dragging) slider.value = String(shown);
    speed.value = String(model.get("speed"));
    const none = last === 0;
    for (const part of [back, play, step, slider]) part.disabled = none;
    back.disabled = none || shown <= first;
    step.disabled = none || shown >= last;
    const badge = none ? {} : model.get("past") ?? {};
    past.hidden = !badge.word;
    past.textContent = badge.word ? `${badge.sign} ${badge.word}` : "";
    past.title = badge.hint ?? "";
    past.style.setProperty("--past", badge.colour ?? "transparent");
    label.textContent = none ? texts.none : texts.step_of.replace("{step}", shown.toLocaleString()).replace("{last}", last.toLocaleString());
    label.title = none ? "" : first <= 1 ? texts.all_kept : texts.kept.replace("{first}", first.toLocaleString());
  }
  const names = ["first", "last", "step", "live", "playing", "speed", "past"];
  for (const name of names) model.on(`change:${name}`, draw);
  draw();

  const onKey = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || takesKey(event) || model.get("last") === 0) return;
    const kind = { " ": toggle, ArrowLeft: () => "back", ArrowRight: () => "step" }[event.key];
    if (!kind) return;
    event.preventDefault();
    act(kind());
  };
  document.addEventListener("keydown", onKey);
  return () => {
    document.removeEventListener("keydown", onKey);
    for (const name of names) model.off(`change:${name}`, draw);
  };
}

export default { render };

// Buttons, switches, sliders, choices and boxes for text: the browser's own controls with their names, in our look.
const CONTROL_CSS = `
:host { font: 13.5px var(--bokeh-base-font, system-ui, sans-serif); color: var(--panel-on-surface-color); }
button { font: inherit; font-weight: 500; color: inherit; background: none; border: 1px solid color-mix(in srgb, currentColor 26%, transparent); border-radius: 8px;
  min-height: 34px; padding: 4px 13px; cursor: pointer; display: inline-flex; align-items: center; justify-content: center; gap: 7px; box-sizing: border-box; line-height: 1.3; }
button.wide { width: 100%; }
button:hover:not(:disabled) { background: color-mix(in srgb, currentColor 8%, transparent); }
button.outlined { color: var(--panel-primary-color); border-color: color-mix(in srgb, var(--panel-primary-color) 50%, transparent); }
button.contained, button[aria-checked=true] { background: var(--panel-primary-color); border-color: var(--panel-primary-color); color: var(--panel-surface-color); }
button.contained:hover:not(:disabled) { background: color-mix(in srgb, var(--panel-primary-color) 85%, var(--panel-on-surface-color)); }
button.text { border-color: transparent; }
button.warning { color: color-mix(in srgb, #d55e00 75%, var(--panel-on-surface-color)); }
button svg { width: 17px; height: 17px; fill: currentColor; flex: none; }
:disabled, .off { opacity: .5; cursor: default !important; }
:focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
label, .label { display: flex; justify-content: space-between; gap: 8px; font-size: 12.5px; margin-bottom: 3px; }
output { font-variant-numeric: tabular-nums; font-weight: 600; }
input, select, textarea { font: inherit; color: inherit; accent-color: var(--panel-primary-color); box-sizing: border-box; }
input[type=range] { width: 100%; margin: 2px 0; cursor: pointer; }
input[type=text], input[type=number], select, textarea { width: 100%; min-height: 34px; padding: 5px 10px; border-radius: 8px; background: var(--panel-surface-color);
  border: 1px solid color-mix(in srgb, currentColor 26%, transparent); }
.line { flex-direction: row; justify-content: flex-start; align-items: center; cursor: pointer; margin: 0; font-size: 13.5px; }
[role=radiogroup], .group { display: flex; flex-wrap: wrap; gap: 6px; }
[role=radiogroup] button { flex: 1 1 auto; }
`;
const PATHS = { // our own drawings for the names of icons that pages use
  play_arrow: "M7 4.5v15L19.5 12z", pause: "M6.5 5h4v14h-4zM13.5 5h4v14h-4z", stop: "M6 6h12v12H6z", send: "M3 20.5v-7l9-1.5-9-1.5v-7L22 12z",
  skip_next: "M15.6 5H18v14h-2.4zM4 5l10.4 7L4 19z", close: "M6 4.6 12 10.6 18 4.6 19.4 6 13.4 12 19.4 18 18 19.4 12 13.4 6 19.4 4.6 18 10.6 12 4.6 6z",
  timer: "M9 1h6v2H9zM12 5a8 8 0 1 0 0 16 8 8 0 0 0 0-16zm0 2a6 6 0 1 1 0 12 6 6 0 0 1 0-12zm-1 2h2v5h-2z",
  undo: "M10 4v4h4a6 6 0 0 1 0 12H7v-2h7a4 4 0 0 0 0-8h-4v4L3.5 9z", restart_alt: "M12 3v3a7 7 0 1 1-7 7h2a5 5 0 1 0 5-5v3L7.5 7z",
};
let ids = 0;

function make(tag, className, ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}

function iconOf(name) {
  if (!PATHS[name]) return null;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.appendChild(document.createElementNS(svg.namespaceURI, "path")).setAttribute("d", PATHS[name]);
  return svg;
}

const shownNumber = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : "–");

// Each maker takes (root, p: the properties, act(name, value)) and returns draw(), called after properties have changed.
// While a person moves a control it is not moved under their hand.
function held(input) {
  let busy = false;
  input.addEventListener("input", () => { busy = true; });
  for (const name of ["change", "blur"]) input.addEventListener(name, () => { busy = false; });
  return () => busy;
}

function labelled(root, input, output) {
  input.id = `ct-control-${++ids}`;
  const name = make("span");
  const label = make("label", "", name);
  label.htmlFor = input.id;
  if (output) label.append(output);
  root.append(label, input);
  return (p) => {
    name.textContent = p.label;
    label.hidden = !p.label && !output;
    label.title = input.title = p.hint;
    input.disabled = p.disabled;
  };
}

function button(root, p, act) {
  const made = make("button");
  made.type = "button";
  made.addEventListener("click", () => act("click", null));
  root.append(made);
  return () => {
    made.className = [p.variant, p.color, (p.classes ?? []).includes("ctm-wide") ? "wide" : ""].join(" ");
    made.replaceChildren(...[iconOf(p.icon), p.label].filter(Boolean));
    if (!made.childNodes.length) made.textContent = p.hint;
    made.title = p.hint;
    if (!p.label) made.setAttribute("aria-label", p.hint);
    made.disabled = p.disabled;
  };
}

function switchBox(root, p, act) {
  const input = make("input"), text = make("span");
  input.type = "checkbox";
  const label = make("label", "line", input, text);
  input.addEventListener("change", () => act("value", input.checked));
  root.append(label);
  return () => {
    text.textContent = p.label;
    label.title = p.hint;
    input.checked = p.value;
    input.disabled = p.disabled;
  };
}

function slider(root, p, act) {
  const input = make("input"), output = make("output");
  input.type = "range";
  const named = labelled(root, input, output), busy = held(input);
  input.addEventListener("input", () => {
    output.textContent = shownNumber(Number(input.value));
    act("value", Number(input.value));
  });
  return () => {
    named(p);
    Object.assign(input, { min: p.start, max: p.end, step: p.step });
    if (busy()) return;
    input.value = p.value;
    output.textContent = shownNumber(p.value);
  };
}

function steps(root, p, act) {
  const input = make("input"), output = make("output");
  input.type = "range";
  const named = labelled(root, input, output), busy = held(input);
  const say = (index) => {
    output.textContent = p.options[index] ?? "–";
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => { say(Number(input.value)); act("value", Number(input.value)); });
  return () => {
    named(p);
    Object.assign(input, { min: 0, max: Math.max(0, p.options.length - 1), step: 1 });
    if (busy()) return;
    input.value = p.value;
    say(p.value);
  };
}

function rangeOf(root, p, act) {
  const output = make("output"), name = make("span"), ends = [0, 1].map(() => make("input"));
  root.append(make("div", "label", name, output), ...ends);
  const say = () => { output.textContent = ends.map((e) => shownNumber(Number(e.value))).join(" – "); };
  const busy = ends.map(held);
  ends.forEach((input, i) => {
    input.type = "range";
    input.addEventListener("input", () => { say(); act("value", ends.map((e) => Number(e.value))); });
    input.dataset.end = i;
  });
  return () => {
    name.textContent = p.label;
    ends.forEach((input, i) => {
      Object.assign(input, { min: p.start, max: p.end, step: p.step, disabled: p.disabled, title: p.hint });
      input.setAttribute("aria-label", `${p.label} ${i ? "≤" : "≥"}`);
      if (!busy[i]()) input.value = p.value[i];
    });
    say();
  };
}

function select(root, p, act) {
  const input = make("select");
  const named = labelled(root, input);
  input.addEventListener("change", () => act("value", input.selectedIndex));
  return () => {
    named(p);
    const known = [...input.options].map((o) => o.text);
    if (known.join("\n") !== p.options.join("\n")) input.replaceChildren(...p.options.map((text) => new Option(text)));
    input.selectedIndex = p.value;
  };
}

function radio(root, p, act) {
  const group = make("div"), title = make("div", "label");
  group.setAttribute("role", "radiogroup");
  root.append(title, group);
  const choose = (index) => { if (index !== p.value) act("value", index); };
  group.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const next = (p.value + by + p.options.length) % p.options.length;
    group.children[next].focus();
    choose(next);
  });
  return () => {
    title.textContent = p.label;
    title.hidden = !p.label;
    group.setAttribute("aria-label", p.label);
    group.title = p.hint;
    while (group.children.length > p.options.length) group.lastChild.remove();
    p.options.forEach((text, index) => {
      let made = group.children[index];
      if (!made) {
        made = group.appendChild(make("button"));
        made.type = "button";
        made.setAttribute("role", "radio");
        made.addEventListener("click", () => choose(index));
      }
      made.textContent = text;
      made.disabled = p.disabled;
      made.setAttribute("aria-checked", String(index === p.value));
      made.tabIndex = index === Math.max(0, p.value) ? 0 : -1;
    });
  };
}

function checks(root, p, act) {
  const group = make("div", "group"), title = make("div", "label");
  group.setAttribute("role", "group");
  root.append(title, group);
  return () => {
    title.textContent = p.label;
    group.setAttribute("aria-label", p.label);
    group.title = p.hint;
    group.replaceChildren(...p.options.map((text, index) => {
      const input = make("input");
      Object.assign(input, { type: "checkbox", checked: p.value.includes(index), disabled: p.disabled });
      input.addEventListener("change", () => act("value", input.checked ? [...p.value, index] : p.value.filter((i) => i !== index)));
      return make("label", "line", input, text);
    }));
  };
}

function textBox(root, p, act) {
  const input = make(p.lines ? "textarea" : "input");
  if (p.lines) input.rows = p.lines;
  else input.type = "text";
  const named = labelled(root, input), busy = held(input);
  input.addEventListener("change", () => act("value", input.value));
  return () => {
    named(p);
    input.placeholder = p.placeholder;
    if (!busy() && input.value !== p.value) input.value = p.value;
  };
}

function numberBox(root, p, act) {
  const input = make("input");
  input.type = "number";
  const named = labelled(root, input), busy = held(input);
  input.addEventListener("change", () => { if (input.value !== "" && input.checkValidity()) act("value", Number(input.value)); });
  return () => {
    named(p);
    Object.assign(input, { min: p.start ?? "", max: p.end ?? "", step: p.step ?? "any" });
    if (!busy()) input.value = p.value ?? "";
  };
}

const CONTROLS = { button, switch: switchBox, slider, steps, range: rangeOf, select, radio, checks, text: textBox, number: numberBox };

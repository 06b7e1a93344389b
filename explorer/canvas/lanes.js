// A tree of tokens in lanes. One ESM file for Panel and for anywidget.
// Python -> here: data = {names, first, leftOut, nodes: [[column, lane, text, state, parent, [[label, value]], key]]}, selected, empty, texts, look (counted up: scroll here).
// Here -> Python: action = {seq, kind: "choose", key}. Every text is set through textContent.

const CELL = 74, ROW = 30, HIGH = 22, HEAD = 20;
const CSS = `
.ct-lanes { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-lanes .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-lanes .frame { display: grid; grid-template-columns: auto minmax(0, 1fr); }
.ct-lanes .names { padding: ${HEAD}px 10px 0 0; font-size: 12px; color: var(--muted); } .ct-lanes .names div { height: ${ROW}px; line-height: ${HIGH}px; white-space: nowrap; }
.ct-lanes .scroll { overflow-x: auto; scrollbar-width: thin; border-radius: 4px; } .ct-lanes .scroll:focus-visible { outline: 2px solid var(--panel-primary-color); }
.ct-lanes svg { display: block; } .ct-lanes svg text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--panel-on-surface-color); pointer-events: none; }
.ct-lanes svg text.at { font: 11px var(--bokeh-base-font, sans-serif); fill: var(--muted); }
.ct-lanes .node rect { fill: color-mix(in srgb, #56b4e9 20%, var(--panel-surface-color)); stroke: color-mix(in srgb, #56b4e9 60%, var(--panel-surface-color)); cursor: pointer; }
.ct-lanes .edge { fill: none; stroke: color-mix(in srgb, currentColor 35%, transparent); stroke-width: 1.5; }
.ct-lanes .best rect { fill: color-mix(in srgb, #009e73 34%, var(--panel-surface-color)); stroke: #009e73; stroke-width: 1.5; } .ct-lanes .edge.best { stroke: #009e73; stroke-width: 3; }
.ct-lanes .dead rect { fill: none; stroke: var(--line); stroke-dasharray: 3 3; } .ct-lanes .dead text { fill: var(--muted); text-decoration: line-through; } .ct-lanes .edge.dead { stroke-dasharray: 2 4; opacity: .7; }
.ct-lanes .ended rect { stroke: currentColor; stroke-width: 1.5; } .ct-lanes .forced rect { fill: color-mix(in srgb, #e69f00 40%, var(--panel-surface-color)); stroke: #e69f00; }
.ct-lanes .on rect { stroke: #d55e00; stroke-width: 2.5; stroke-dasharray: none; } .ct-lanes .cursor rect { stroke: var(--panel-primary-color); stroke-width: 2.5; }
.ct-lanes .note { font-size: 12px; color: var(--muted); margin-top: 4px; }
.ct-lanes .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 280px; padding: 8px 11px; border-radius: 9px; font-size: 12.5px; line-height: 1.5;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
.ct-lanes .tip dl { display: grid; grid-template-columns: auto auto; gap: 0 12px; margin: 4px 0 0; } .ct-lanes .tip dt { color: var(--muted); } .ct-lanes .tip dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
`;
const SVG = "http://www.w3.org/2000/svg";
const draw = (tag, attributes, text) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const visible = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥"));
const cut = (text) => (visible(text).length > 8 ? `${visible(text).slice(0, 7)}…` : visible(text));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-lanes");
  const body = make("div");
  const tip = make("div", "tip");
  tip.setAttribute("role", "status");
  root.append(make("style", "", CSS), body, tip);
  el.append(root);
  let seq = model.get("action")?.seq ?? 0;
  let shapes = []; // one <g> a node
  let scroll = null;
  let cursor = -1;
  let seen = []; // the selection that was brought into view
  const nodes = () => model.get("data").nodes ?? [];
  const choose = (i) => {
    model.set("action", { seq: ++seq, kind: "choose", key: nodes()[i][6] });
    model.save_changes();
  };
  const x = (column) => column * CELL + 2;
  const y = (lane) => HEAD + lane * ROW;

  function paint() {
    const { names, first, leftOut, nodes: all } = model.get("data");
    tip.style.display = "none";
    if (!all || !all.length) {
      shapes = [];
      scroll = null;
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    const follow = !scroll || scroll.scrollWidth - scroll.scrollLeft - scroll.clientWidth < 2 * CELL;
    const before = scroll?.scrollLeft ?? 0, focused = scroll?.matches(":focus") ?? false;
    const columns = Math.max(...all.map((node) => node[0])) + 1;
    const svg = draw("svg", { width: columns * CELL + 4, height: HEAD + names.length * ROW, role: "img", "aria-label": `${texts.walk}: ${names.length} × ${columns}` });
    for (let column = 0; column < columns; column += 1) svg.append(draw("text", { class: "at", x: x(column), y: 12 }, String(first + column)));
    shapes = all.map(([column, lane, text, state, parent], i) => {
      if (parent >= 0) {
        const [from, above] = all[parent];
        const x0 = x(from) + CELL - 12, y0 = y(above) + HIGH / 2, x1 = x(column), y1 = y(lane) + HIGH / 2;
        const half = Math.max(6, (x1 - x0) / 2);
        svg.append(draw("path", { class: `edge ${state}`, d: `M${x0} ${y0}C${x0 + half} ${y0} ${x1 - half} ${y1} ${x1} ${y1}` }));
      }
      const shape = draw("g", { class: `node ${state}` });
      shape.append(draw("rect", { x: x(column), y: y(lane), width: CELL - 12, height: HIGH, rx: 5 }), draw("text", { x: x(column) + 5, y: y(lane) + 15 }, cut(text)));
      shape.ctNode = i;
      return shape;
    });
    svg.append(...shapes);
    svg.addEventListener("click", (event) => {
      const at = event.target.parentNode?.ctNode;
      if (at !== undefined) choose(at);
    });
    svg.addEventListener("pointerover", (event) => {
      const at = event.target.parentNode?.ctNode;
      if (at === undefined) tip.style.display = "none";
      else tell(at);
    });
    const side = make("div", "names");
    for (const name of names) side.append(make("div", "", name));
    scroll = make("div", "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "application");
    scroll.setAttribute("aria-label", texts.walk);
    scroll.addEventListener("keydown", walk);
    scroll.append(svg);
    const frame = make("div", "frame");
    frame.append(side, scroll);
    body.replaceChildren(frame, ...(leftOut ? [make("div", "note", texts.left_out.replace("{n}", leftOut))] : []));
    scroll.scrollLeft = follow ? scroll.scrollWidth : before;
    if (focused) scroll.focus({ preventScroll: true });  // whoever walks it by keys goes on while it grows
    cursor = Math.min(cursor, all.length - 1);
    mark();
  }

  function mark() {
    const selected = model.get("selected");
    shapes.forEach((shape, i) => {
      shape.classList.toggle("on", selected.length > 0 && same(nodes()[i][6], selected));
      shape.classList.toggle("cursor", i === cursor);
    });
    const at = selected.length ? nodes().findIndex((node) => same(node[6], selected)) : -1;
    if (at >= 0 && !same(selected, seen)) reveal(at);
    seen = selected;
  }

  function reveal(i) {
    const left = x(nodes()[i][0]);
    if (left < scroll.scrollLeft || left + CELL > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = left - scroll.clientWidth / 2;
  }

  function tell(i) {
    const [, lane, text, state, , hint] = nodes()[i];
    const list = make("dl");
    for (const [label, value] of hint) list.append(make("dt", "", label), make("dd", "", value));
    tip.replaceChildren(make("b", "", `${JSON.stringify(text)} · ${model.get("data").names[lane]}`), ...(texts[state] ? [make("div", "", texts[state])] : []), list);
    tip.style.display = "block";
    const at = shapes[i].getBoundingClientRect();
    const box = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${at.bottom - box.top + 6}px`;
  }

  function walk(event) {
    const all = nodes();
    const key = event.key;
    let next = cursor;
    if (cursor < 0 && key.startsWith("Arrow")) next = 0;
    else if (key === "ArrowLeft") next = all[cursor][4] >= 0 ? all[cursor][4] : cursor;
    else if (key === "ArrowRight") next = all.findIndex((node) => node[4] === cursor);
    else if (key === "ArrowDown" || key === "ArrowUp") {
      const there = all.map((node, i) => [node[1], i]).filter(([lane, i]) => all[i][0] === all[cursor][0] && (key === "ArrowDown" ? lane > all[cursor][1] : lane < all[cursor][1]));
      there.sort((a, b) => (key === "ArrowDown" ? a[0] - b[0] : b[0] - a[0]));
      next = there.length ? there[0][1] : cursor;
    } else if (key === "Enter" && cursor >= 0) choose(cursor);
    else return;
    event.preventDefault();
    event.stopPropagation(); // the arrow keys move time everywhere else
    if (next < 0) next = cursor;
    cursor = next;
    mark();
    if (cursor >= 0 && key !== "Enter") {
      reveal(cursor);
      tell(cursor);
    }
  }
  root.addEventListener("pointerleave", () => { tip.style.display = "none"; });

  const watched = { data: paint, empty: paint, selected: mark, look: () => root.scrollIntoView({ block: "center" }) };
  for (const [name, react] of Object.entries(watched)) model.on(`change:${name}`, react);
  paint();
  return () => {
    for (const [name, react] of Object.entries(watched)) model.off(`change:${name}`, react);
  };
}

export default { render };

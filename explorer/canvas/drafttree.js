// The tree of a draft and its attention mask. One ESM file for Panel and for anywidget.
// Python -> here: data = {key, nodes: [[text, parent, depth, lane, outcome, [p, q]]], path, own: [text, kind] | [], mask: [[0|1]], position, chain}, empty, texts.
// Every text is set through textContent.

const CELL = 96, ROW = 34, HIGH = 24, WIDE = 78, TOP = 6;
const CSS = `
.ct-tree { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-tree .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-tree .what { font-size: 12px; color: var(--muted); margin: 10px 0 4px; } .ct-tree .what:first-child { margin-top: 0; }
.ct-tree .scroll { overflow: auto; max-height: 330px; scrollbar-width: thin; border-radius: 4px; } .ct-tree .scroll:focus-visible { outline: 2px solid var(--panel-primary-color); }
.ct-tree svg { display: block; } .ct-tree text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--panel-on-surface-color); pointer-events: none; } .ct-tree text.small { font: 11px var(--bokeh-base-font, sans-serif); fill: var(--muted); }
.ct-tree .node rect { fill: none; stroke: var(--line); stroke-dasharray: 3 3; } .ct-tree .edge { fill: none; stroke: color-mix(in srgb, currentColor 30%, transparent); stroke-width: 1.5; stroke-dasharray: 2 4; }
.ct-tree .root rect { stroke: currentColor; stroke-dasharray: none; } .ct-tree .accepted rect { fill: color-mix(in srgb, #009e73 26%, var(--panel-surface-color)); stroke: #009e73; stroke-width: 1.5; stroke-dasharray: none; }
.ct-tree .edge.accepted { stroke: #009e73; stroke-width: 3; stroke-dasharray: none; } .ct-tree .rejected rect { stroke: #d55e00; } .ct-tree .rejected text.word { text-decoration: line-through; }
.ct-tree .own rect { fill: color-mix(in srgb, #e69f00 26%, var(--panel-surface-color)); stroke: #e69f00; stroke-dasharray: none; stroke-width: 1.5; } .ct-tree .edge.own { stroke: #e69f00; stroke-width: 2.5; stroke-dasharray: none; }
.ct-tree .cell { fill: none; stroke: var(--line); } .ct-tree .cell.on { fill: #0072b2; stroke: none; } .ct-tree .cell.before { fill: color-mix(in srgb, #0072b2 45%, transparent); stroke: none; } .ct-tree .cell.kept { fill: #009e73; }
.ct-tree .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 260px; padding: 7px 10px; border-radius: 9px; font-size: 12.5px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
`;
const SVG = "http://www.w3.org/2000/svg";
const draw = (tag, attributes, text) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const flat = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥"));
const cut = (text) => (flat(text).length > 8 ? `${flat(text).slice(0, 7)}…` : flat(text));
const shown = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(3))));
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const SIGN = { accepted: "✓", rejected: "✕", "not reached": "" };

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-tree");
  const body = make("div");
  const tip = make("div", "tip");
  tip.setAttribute("role", "status");
  root.append(make("style", "", CSS), body, tip);
  el.append(root);

  root.addEventListener("pointerover", (event) => {
    const at = event.composedPath().find((node) => node.ctTip);
    if (!at) { tip.style.display = "none"; return; }
    tip.textContent = at.ctTip;
    tip.style.display = "block";
    const box = root.getBoundingClientRect(), from = at.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(from.left - box.left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${from.bottom - box.top + 6}px`;
  });
  root.addEventListener("pointerleave", () => { tip.style.display = "none"; });

  function place(x, y, state, text, hint, sign) {
    const made = draw("g", { class: `node ${state}` });
    made.append(draw("rect", { x, y, width: WIDE, height: HIGH, rx: 5 }), draw("text", { class: "word", x: x + 6, y: y + 16 }, cut(text)));
    if (sign) made.append(draw("text", { class: "small", x: x + WIDE - 14, y: y + 16 }, sign));
    made.ctTip = hint;
    return made;
  }

  function edge(x0, y0, x1, y1, state) {
    const half = (x1 - x0) / 2;
    return draw("path", { class: `edge ${state}`, d: `M${x0} ${y0}C${x0 + half} ${y0} ${x1 - half} ${y1} ${x1} ${y1}` });
  }

  function tree(data) {
    const lanes = Math.max(0, ...data.nodes.map((node) => node[3])) + 1;
    const deep = Math.max(...data.nodes.map((node) => node[2]));
    const last = data.path.length ? data.path[data.path.length - 1] : -1;
    const ownDepth = data.path.length + 1;
    const columns = Math.max(deep, data.own.length ? ownDepth : 0) + 1;
    const x = (depth) => depth * CELL + 2, y = (lane) => TOP + lane * ROW;
    const middle = data.nodes.filter((node) => node[1] < 0).map((node) => node[3]);
    const rootLane = middle.length ? (middle[0] + middle[middle.length - 1]) / 2 : 0;
    const free = !data.nodes.some((node) => node[1] === last); // a bonus: nothing stands behind the last accepted one
    const ownLane = !free ? lanes : last < 0 ? rootLane : data.nodes[last][3];
    const svg = draw("svg", { width: columns * CELL, height: TOP + (lanes + (data.own.length && !free ? 1 : 0)) * ROW, role: "img", "aria-label": texts.tree });
    const at = (i) => (i < 0 ? [x(0) + WIDE, y(rootLane) + HIGH / 2] : [x(data.nodes[i][2]) + WIDE, y(data.nodes[i][3]) + HIGH / 2]);
    for (const [, parent, depth, lane, outcome] of data.nodes) svg.append(edge(...at(parent), x(depth), y(lane) + HIGH / 2, outcome === "accepted" ? "accepted" : ""));
    if (data.own.length) svg.append(edge(...at(last), x(ownDepth), y(ownLane) + HIGH / 2, "own"));
    svg.append(place(x(0), y(rootLane), "root", texts.root_short, texts.root));
    data.nodes.forEach(([text, , depth, lane, outcome, [p, q]], i) => {
      const hint = `${i + 1}: ${JSON.stringify(text)}\n${texts[outcome]}\n${texts.place} ${depth}\n${texts.p} = ${shown(p)}\n${texts.q} = ${shown(q)}`;
      svg.append(place(x(depth), y(lane), outcome === "not reached" ? "" : outcome, text, hint, SIGN[outcome]));
    });
    if (data.own.length) svg.append(place(x(ownDepth), y(ownLane), "own", data.own[0], `${JSON.stringify(data.own[0])}\n${texts[data.own[1]] ?? ""}`, data.own[1] === "bonus" ? "+" : "→"));
    return svg;
  }

  function mask(data) {
    const size = data.mask.length, cell = size > 24 ? 13 : 18, left = 96, top = 66;
    const names = [texts.root, ...data.nodes.map((node) => node[0])];
    const svg = draw("svg", { width: left + (size + 1) * cell + 40, height: top + size * cell + 4, role: "img", "aria-label": texts.mask });
    const kept = new Set([0, ...data.path.map((i) => i + 1)]);
    const label = (j) => (j < 0 ? texts.before : j === 0 ? names[0] : `${j} ${JSON.stringify(names[j])}`);
    for (let j = -1; j < size; j += 1) {
      const x = left + (j + 1) * cell + cell / 2 + 4;
      svg.append(draw("text", { class: "small", x, y: top - 6, transform: `rotate(-45 ${x} ${top - 6})` }, j < 0 ? texts.before : j === 0 ? names[0] : cut(names[j])));
    }
    for (let i = 0; i < size; i += 1) {
      svg.append(draw("text", { class: "small", x: left - 6, y: top + i * cell + cell - 5, "text-anchor": "end" }, i === 0 ? names[0] : `${i} ${cut(names[i])}`));
      for (let j = -1; j < size; j += 1) {
        const on = j < 0 || data.mask[i][j] === 1;
        const square = draw("rect", { class: `cell ${j < 0 ? "before" : on ? `on${kept.has(i) && kept.has(j) ? " kept" : ""}` : ""}`, x: left + (j + 1) * cell, y: top + i * cell, width: cell - 2, height: cell - 2, rx: 2 });
        square.ctTip = fill(on ? texts.sees : texts.not, { row: label(i), column: label(j) });
        svg.append(square);
      }
    }
    return svg;
  }

  function framed(svg, label) {
    const made = make("div", "scroll");
    made.tabIndex = 0;
    made.setAttribute("role", "group");
    made.setAttribute("aria-label", label);
    made.append(svg);
    return made;
  }

  function paint() {
    const data = model.get("data");
    tip.style.display = "none";
    if (!data.nodes) {
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    body.replaceChildren(make("div", "what", data.chain ? texts.chain : texts.tree), framed(tree(data), texts.tree), make("div", "what", texts.mask), framed(mask(data), texts.mask));
  }
  model.on("change:data", paint);
  model.on("change:empty", paint);
  paint();
  return () => {
    model.off("change:data", paint);
    model.off("change:empty", paint);
  };
}

export default { render };

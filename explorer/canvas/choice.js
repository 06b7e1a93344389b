// How one token was chosen. One ESM file for Panel and for anywidget.
// Python -> here: told, the JSON of {columns: [[name, label, hint]], rows: [{id, text, shares: [p|null], removed, chosen, lands}], others: [p|null],
//   numOthers, segments: [[id, text, p]], rest, numRest, u, lands: text|null, curve: {ranks, sums, p, size}}, empty, texts.
// Every text is set through textContent: what a model or a user wrote is never markup.

const CSS = `
.ct-choice { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --soft: color-mix(in srgb, currentColor 6%, transparent);
  --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); --kept: #0072b2; --dart: #d55e00; }
.ct-choice .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-choice .table { overflow-x: auto; scrollbar-width: thin; }
.ct-choice table { border-collapse: collapse; table-layout: fixed; width: 100%; min-width: calc(290px + 78px * var(--columns)); font-size: 13px; font-variant-numeric: tabular-nums; }
.ct-choice th.name { width: 160px; } .ct-choice th.why { width: 126px; }
.ct-choice th { font-weight: 500; font-size: 12px; color: var(--muted); text-align: left; padding: 0 10px 6px 0; white-space: nowrap; cursor: help; }
.ct-choice td { padding: 2px 10px 2px 0; height: 21px; vertical-align: middle; }
.ct-choice td.name { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.ct-choice td.name b { font: 500 12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; padding: 1px 5px; border-radius: 4px; background: var(--soft); }
.ct-choice tr.chosen td.name b { outline: 1.5px solid currentColor; }
.ct-choice tr.lands td.name b { background: color-mix(in srgb, var(--dart) 26%, transparent); }
.ct-choice td.share { padding-right: 8px; }
.ct-choice .cell { display: grid; grid-template-columns: 1fr 46px; gap: 4px; align-items: center; }
.ct-choice .track { height: 11px; border-radius: 3px; background: var(--soft); overflow: hidden; }
.ct-choice .fill { height: 100%; border-radius: 3px; background: var(--kept); min-width: 1px; }
.ct-choice .raw .fill { background: color-mix(in srgb, currentColor 45%, transparent); }
.ct-choice .cell span { text-align: right; font-size: 12px; }
.ct-choice tr.gone td.name { opacity: .55; } .ct-choice td.zero { color: var(--muted); } .ct-choice td.zero .track { background: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 6px); }
.ct-choice td.why { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-size: 12px; color: var(--muted); padding-right: 0; }
.ct-choice tr.lands td.why, .ct-choice tr.chosen td.why { color: inherit; }
.ct-choice tr.others td.name { white-space: normal; } .ct-choice tr.others td { color: var(--muted); border-top: 1px solid var(--line); } .ct-choice tr.others .fill { background: repeating-linear-gradient(90deg, color-mix(in srgb, currentColor 40%, transparent) 0 3px, transparent 3px 5px); }
.ct-choice .below { display: grid; grid-template-columns: minmax(0, 3fr) minmax(230px, 2fr); gap: 22px; margin-top: 14px; align-items: start; }
.ct-choice figcaption { font-size: 12.5px; color: var(--muted); line-height: 1.45; margin-bottom: 6px; } .ct-choice figure { margin: 0; min-width: 0; }
.ct-choice figcaption b { color: var(--panel-on-surface-color); font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; }
.ct-choice .stack { position: relative; padding-top: 26px; }
.ct-choice .pieces { display: flex; height: 34px; border-radius: 6px; overflow: hidden; background: var(--soft); }
.ct-choice .piece { flex: none; min-width: 0; overflow: hidden; font: 12px/34px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; text-align: center; white-space: pre; box-sizing: border-box;
  border-right: 1px solid var(--panel-surface-color); background: color-mix(in srgb, var(--kept) 34%, transparent); }
.ct-choice .piece:nth-child(even) { background: color-mix(in srgb, var(--kept) 20%, transparent); }
.ct-choice .piece.lands { background: color-mix(in srgb, var(--dart) 55%, transparent); font-weight: 600; }
.ct-choice .piece.rest { background: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 6px); } .ct-choice .piece.rest.lands { background: repeating-linear-gradient(135deg, var(--dart) 0 2px, transparent 2px 6px); }
.ct-choice .dart { position: absolute; top: 4px; width: 0; height: 58px; border-left: 2px solid var(--dart); }
.ct-choice .dart::before { content: ""; position: absolute; left: -7px; top: 0; border: 6px solid transparent; border-top: 9px solid var(--dart); }
.ct-choice .scale { display: flex; justify-content: space-between; font-size: 11.5px; color: var(--muted); margin-top: 3px; }
.ct-choice svg { display: block; width: 100%; height: 120px; overflow: visible; }
.ct-choice svg text { fill: var(--muted); font-size: 11px; } .ct-choice svg .grid { stroke: var(--line); } .ct-choice svg .sum { fill: none; stroke: var(--kept); stroke-width: 2; }
.ct-choice svg .cut { stroke: var(--dart); stroke-width: 1.5; stroke-dasharray: 5 3; }
.ct-choice .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 280px; padding: 8px 11px; border-radius: 9px; font-size: 12.5px; line-height: 1.5; white-space: pre-wrap;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); font-variant-numeric: tabular-nums; }
@media (max-width: 900px) { .ct-choice .below { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 600px) { .ct-choice td.mid, .ct-choice th.mid { display: none; } .ct-choice table { min-width: 0; } .ct-choice th.name { width: 88px; } .ct-choice th.why { width: 92px; }
  .ct-choice .cell { grid-template-columns: 1fr 46px; gap: 4px; } .ct-choice td.why { font-size: 11px; } .ct-choice td, .ct-choice th { padding-right: 6px; } }
`;
const SVG = "http://www.w3.org/2000/svg";
const percent = (p) => (p === null ? "–" : p === 0 ? "0" : p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toPrecision(2)} %` : "< 0.01 %");
const significant = (p) => String(Number(p.toPrecision(3))); // 0.00161, 1, 1.2e-9
const visible = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥"));
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-choice");
  const tip = make("div", "tip");
  const body = make("div");
  root.append(make("style", "", CSS), body, tip);
  el.append(root);

  const show = (text, at) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = root.getBoundingClientRect();
    const from = at.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(from.left - box.left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${from.bottom - box.top + 6}px`;
  };
  const told = (element, text) => {
    element.ctTip = text;
    return element;
  };
  root.addEventListener("pointerover", (event) => {
    const at = event.composedPath().find((node) => node.ctTip);
    if (at) show(at.ctTip, at);
    else tip.style.display = "none";
  });
  root.addEventListener("pointerleave", () => { tip.style.display = "none"; });

  // A move of a knob changes numbers, and seldom more: what stands there is kept, and only what differs is set, since a browser lays out
  // again whatever it is given.
  const set = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const dress = (element, className) => {
    if (element.className !== className) element.className = className;
  };

  function share(className) {
    const td = make("td", `share ${className}`);
    const cell = add(td, "div", "cell");
    const bar = add(add(cell, "div", "track"), "div", "fill");
    const number = add(cell, "span");
    return {
      td,
      show(p, most, column) {
        dress(td, `share ${className}${p === 0 ? " zero" : ""}`);
        const width = `${p ? Math.max(0.4, (100 * p) / most) : 0}%`;
        if (bar.style.width !== width) bar.style.width = width;
        if (bar.hidden === !!p) bar.hidden = !p;
        set(number, percent(p));
        told(td, `${column}\np = ${p === null ? texts.unknown : significant(p)}`);
      },
    };
  }

  // The table for these columns: its element, and `show` for what stands in it.
  function table(columns) {
    const frame = make("div", "table");
    frame.tabIndex = 0;
    const made = add(frame, "table");
    made.style.setProperty("--columns", columns.length);
    const last = columns.length - 1;
    const place = (i) => (i === 0 ? "raw" : i === last ? "end" : "mid");
    const line = () => {
      const tr = make("tr");
      const name = add(tr, "td", "name");
      const shares = columns.map((_column, i) => share(place(i)));
      tr.append(...shares.map((one) => one.td));
      return { tr, name, shares, why: add(tr, "td", "why") };
    };
    const head = add(made, "tr");
    add(head, "th", "name", texts.token);
    const heads = columns.map((_column, i) => add(head, "th", place(i)));
    add(head, "th", "why", "");
    const rows = [];
    const others = line();
    dress(others.tr, "others");
    made.append(others.tr);

    function show(data) {
      data.columns.forEach(([, label, hint], i) => {
        set(heads[i], label);
        told(heads[i], hint);
      });
      while (rows.length > data.rows.length) rows.pop().tr.remove();
      while (rows.length < data.rows.length) {
        const row = line();
        row.token = add(row.name, "b");
        rows.push(row);
        made.insertBefore(row.tr, others.tr);
      }
      const most = Math.max(1e-9, ...data.rows.flatMap((row) => row.shares.map((p) => p ?? 0)));
      data.rows.forEach((row, at) => {
        const { tr, name, token, shares, why } = rows[at];
        dress(tr, `${row.removed ? "gone" : ""} ${row.chosen ? "chosen" : ""} ${row.lands ? "lands" : ""}`);
        if (tr.dataset.id !== String(row.id)) tr.dataset.id = row.id;
        set(token, visible(row.text));
        told(name, `${JSON.stringify(row.text)}\n${fill(texts.token_id, { id: row.id })}`);
        row.shares.forEach((p, i) => shares[i].show(p, most, data.columns[i][1]));
        set(why, (row.lands && data.u !== null ? texts.lands : row.chosen ? texts.chosen : row.removed && `✕ ${row.removed}`) || "");
        told(why, row.removed ? fill(texts.removed, { name: row.removed }) : "");
      });
      set(others.name, fill(texts.others, { n: data.numOthers.toLocaleString("en") }));
      data.others.forEach((p, i) => others.shares[i].show(p, most, data.columns[i][1]));
    }
    return { frame, show };
  }

  function bar(data) {
    const made = make("figure");
    const said = make("figcaption");
    const [before, after] = data.u === null ? [texts.bar_greedy, ""] : fill(texts.bar, { u: data.u.toFixed(4) }).split("{token}");
    said.append(before);
    if (data.u !== null) said.append(make("b", "", data.lands === null ? texts.unseen : JSON.stringify(data.lands)), after ?? "");
    const stack = make("div", "stack");
    const pieces = make("div", "pieces");
    pieces.setAttribute("role", "img");
    pieces.setAttribute("aria-label", said.textContent);
    let at = 0;
    for (const [id, text, p] of data.segments) {
      const piece = make("div", "piece", p > 0.035 ? visible(text) : "");
      piece.style.width = `${100 * p}%`;
      const here = data.u === null ? at === 0 : data.u >= at && data.u < at + p;
      if (here) piece.classList.add("lands");
      piece.dataset.id = id;
      pieces.append(told(piece, `${JSON.stringify(text)}\n${fill(texts.token_id, { id })}\np = ${significant(p)}\n[${at.toFixed(5)}, ${(at + p).toFixed(5)})`));
      at += p;
    }
    if (data.numRest > 0 && data.rest > 0) {
      const label = fill(texts.rest, { n: data.numRest.toLocaleString("en") });
      const piece = make("div", `piece rest${data.u !== null && data.u >= at ? " lands" : ""}`, data.rest > 0.12 ? label : "");
      piece.style.width = `${100 * data.rest}%`;
      pieces.append(told(piece, `${label}\np = ${significant(data.rest)}\n[${at.toFixed(5)}, 1)`));
    }
    stack.append(pieces);
    if (data.u !== null) {
      const dart = make("div", "dart");
      dart.style.left = `calc(${100 * data.u}% - 1px)`;
      stack.append(told(dart, `u = ${data.u.toFixed(6)}`));
    }
    const scale = make("div", "scale");
    for (const mark of ["0", "0.25", "0.5", "0.75", "1"]) scale.append(make("span", "", mark));
    stack.append(scale);
    made.append(said, stack);
    return made;
  }

  function curve({ ranks, sums, p, size }) {
    const made = make("figure");
    const cut = p === null ? texts.no_cut : size === null ? fill(texts.cut_beyond, { p }) : fill(texts.cut, { p, n: size.toLocaleString("en") });
    const said = make("figcaption", "", `${texts.curve}. `);
    said.append(make("b", "", cut));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", said.textContent);
    svg.setAttribute("viewBox", "0 0 300 120");
    svg.setAttribute("preserveAspectRatio", "none");
    const end = Math.max(10, ranks[ranks.length - 1] ?? 1, size ?? 1);
    const x = (rank) => 26 + (268 * Math.log(rank)) / Math.log(end);
    const y = (sum) => 96 - 88 * sum;
    const add = (tag, attributes, text) => {
      const node = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      if (text !== undefined) node.textContent = text;
      svg.append(node);
    };
    for (const sum of [0, 0.5, 1]) {
      add("line", { class: "grid", x1: 26, x2: 294, y1: y(sum), y2: y(sum) });
      add("text", { x: 0, y: y(sum) + 4 }, String(sum));
    }
    for (let rank = 1; rank <= end; rank *= 10) add("text", { x: x(rank) - 3, y: 110 }, rank.toLocaleString("en"));
    add("text", { x: 300, y: 120, "text-anchor": "end" }, texts.rank);
    add("path", { class: "sum", d: ranks.map((rank, i) => `${i ? "L" : "M"}${x(rank).toFixed(1)} ${y(Math.min(1, sums[i])).toFixed(1)}`).join("") });
    if (ranks.length === 1) add("circle", { cx: x(1), cy: y(sums[0]), r: 3, fill: "#0072b2" });
    if (p !== null) {
      add("line", { class: "cut", x1: 26, x2: 294, y1: y(p), y2: y(p) });
      if (size !== null) add("line", { class: "cut", x1: x(Math.max(1, size)), x2: x(Math.max(1, size)), y1: y(0), y2: y(1) });
    }
    svg.setAttribute("preserveAspectRatio", "xMidYMid meet");
    made.append(said, svg);
    return made;
  }

  let shown = null; // {columns, table, below}

  function draw() {
    const data = JSON.parse(model.get("told"));
    tip.style.display = "none";
    if (!data.rows) {
      shown = null;
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    const columns = data.columns.map(([name]) => name);
    if (!shown || alike(shown.columns, columns) < Math.max(columns.length, shown.columns.length)) {
      shown = { columns, table: table(columns), below: make("div", "below") };
      body.replaceChildren(shown.table.frame, shown.below);
    }
    shown.table.show(data);
    shown.below.replaceChildren(bar(data), curve(data.curve));
  }
  model.on("change:told", draw);
  model.on("change:empty", draw);
  draw();
  return () => {
    model.off("change:told", draw);
    model.off("change:empty", draw);
  };
}

export default { render };

// A text as ribbons. One ESM file for Panel and for anywidget.
// Python -> here: data = {id, prompt, cut, dropped, pieces: [[position, text, kind, round, [p, q, u, accept, rule], lost, residual]], counts}, selected, round, empty,
//   texts; lost = [[text, "rejected" | "unseen", [p, q, u, accept, rule]]]. Here -> Python: action = {seq, kind: "select", position}.
// Every text is set through textContent: what a model or a user wrote is never markup. Kinds differ by line and sign, not by colour alone.

const CSS = `
.ct-ribbon { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color));
  --accepted: #009e73; --rejected: #d55e00; --corrected: #e69f00; --bonus: #0072b2; }
.ct-ribbon .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-ribbon .legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; color: var(--muted); margin-bottom: 8px; align-items: center; }
.ct-ribbon .legend b { font-weight: 600; color: var(--panel-on-surface-color); font-variant-numeric: tabular-nums; margin-left: 3px; }
.ct-ribbon .text { line-height: 2.15; max-height: 17.2em; overflow-y: auto; overflow-wrap: anywhere; white-space: pre-wrap; scrollbar-width: thin; }
.ct-ribbon .prompt, .ct-ribbon .note { color: var(--muted); }
.ct-ribbon .piece { border-radius: 3px; padding: 2px 1px; margin: 0 1px; cursor: pointer; border-bottom: 2px solid var(--line); }
.ct-ribbon .legend .piece, .ct-ribbon .legend .lost { cursor: default; padding: 1px 6px; color: var(--panel-on-surface-color); }
.ct-ribbon .accepted { background: color-mix(in srgb, var(--accepted) 22%, transparent); border-bottom: 3px solid var(--accepted); }
.ct-ribbon .corrected { background: color-mix(in srgb, var(--corrected) 24%, transparent); border-bottom: 3px double var(--corrected); }
.ct-ribbon .bonus { background: color-mix(in srgb, var(--bonus) 20%, transparent); border-bottom: 3px dotted var(--bonus); }
.ct-ribbon .corrected::before, .ct-ribbon .bonus::before { font-size: 10px; vertical-align: 4px; font-weight: 700; color: var(--muted); }
.ct-ribbon .corrected::before { content: "→"; } .ct-ribbon .bonus::before { content: "+"; }
.ct-ribbon .lost { font-size: 12.5px; border-radius: 3px; padding: 1px 1px; margin: 0 1px; cursor: pointer; text-decoration: line-through 1.5px var(--rejected); color: var(--muted);
  border: 1px dashed color-mix(in srgb, var(--rejected) 55%, transparent); }
.ct-ribbon .lost.unseen { text-decoration: line-through 1px; opacity: .75; border-color: var(--line); } .ct-ribbon .more { font-size: 11px; color: var(--muted); margin: 0 2px; cursor: pointer; }
.ct-ribbon .piece:hover, .ct-ribbon .lost:hover { outline: 1.5px solid color-mix(in srgb, currentColor 50%, transparent); }
.ct-ribbon .piece.of { outline: 1.5px dashed color-mix(in srgb, currentColor 55%, transparent); } .ct-ribbon .piece.on { outline: 2px solid var(--panel-primary-color); }
.ct-ribbon :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-ribbon .tip { position: absolute; z-index: 20; pointer-events: none; display: none; width: max-content; max-width: min(300px, 100%); box-sizing: border-box; padding: 8px 11px; border-radius: 9px; font-size: 12.5px; line-height: 1.5;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
.ct-ribbon .tip dl { display: grid; grid-template-columns: auto auto; gap: 0 12px; margin: 4px 0 0; } .ct-ribbon .tip dt { color: var(--muted); } .ct-ribbon .tip dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; white-space: pre-wrap; }
.ct-ribbon .tip .bar { position: relative; height: 8px; border-radius: 4px; margin: 7px 0 2px; background: color-mix(in srgb, currentColor 10%, transparent); }
.ct-ribbon .tip .bar i { position: absolute; inset: 0 auto 0 0; border-radius: 4px; background: var(--accepted); opacity: .55; } .ct-ribbon .tip .bar b { position: absolute; top: -3px; width: 2px; height: 14px; background: var(--rejected); }
`;
const visible = (text) => (text === "" ? "∅" : text.replace(/\r?\n/g, "↵\n").replace(/\t/g, "⇥\t"));
const flat = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥"));
const significant = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(4))));
const LOST_SHOWN = 1; // of those that were never looked at

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-ribbon");
  const body = make("div");
  const tip = make("div", "tip");
  tip.setAttribute("role", "status");
  root.append(make("style", "", CSS), body, tip);
  el.append(root);
  let seq = model.get("action")?.seq ?? 0;
  let drawn = null;
  let text, prompt, note, pieces, legend;
  const choose = (position) => {
    model.set("action", { seq: ++seq, kind: "select", position: position === model.get("selected") ? null : position });
    model.save_changes();
  };

  function frame() {
    legend = make("div", "legend");
    text = make("div", "text");
    prompt = make("span", "prompt");
    note = make("span", "note");
    pieces = make("span", "pieces");
    pieces.tabIndex = 0;
    pieces.setAttribute("role", "listbox");
    pieces.addEventListener("keydown", onKey);
    pieces.addEventListener("click", (event) => {
      const at = event.target.closest("[data-position]");
      if (at) choose(Number(at.dataset.position));
    });
    text.append(prompt, note, pieces);
    body.replaceChildren(legend, text);
  }

  function key(counts) {
    legend.replaceChildren();
    for (const kind of ["accepted", "rejected", "unseen", "corrected", "bonus", "plain"]) {
      const item = make("span");
      const sample = kind === "rejected" || kind === "unseen" ? make("span", `lost ${kind}`, "abc") : make("span", `piece ${kind}`, "abc");
      sample.setAttribute("aria-hidden", "true");
      item.append(sample, document.createTextNode(` ${texts.kinds[kind]}`), make("b", "", String(counts[kind])));
      legend.append(item);
    }
  }

  function elements(piece) {
    const [position, value, kind, , , lost] = piece;
    const made = [];
    const rejected = lost.filter((each) => each[1] === "rejected");
    const unseen = lost.filter((each) => each[1] !== "rejected");
    for (const each of [...rejected, ...unseen.slice(0, LOST_SHOWN)]) {
      const old = make("span", `lost ${each[1]}`, flat(each[0]));
      old.ctLost = each;
      old.dataset.position = position;
      made.push(old);
    }
    if (unseen.length > LOST_SHOWN) {
      const rest = make("span", "more", `+${unseen.length - LOST_SHOWN}`);
      rest.title = texts.more.replace("{n}", unseen.length - LOST_SHOWN);
      rest.dataset.position = position;
      made.push(rest);
    }
    const chip = make("span", `piece ${kind}`, visible(value));
    chip.ctPiece = piece;
    chip.dataset.position = position;
    chip.setAttribute("role", "option");
    chip.setAttribute("aria-label", `${JSON.stringify(value)}: ${texts.kinds[kind]}${rejected.length ? `, ${texts.instead} ${rejected.map((each) => JSON.stringify(each[0])).join(", ")}` : ""}`);
    return [...made, chip];
  }

  function draw() {
    const data = model.get("data");
    tip.style.display = "none";
    if (!data.pieces) {
      drawn = null;
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    if (!drawn) frame();
    // What stays as it was keeps its elements: a click on one, begun before, still counts.
    const kept = drawn && drawn.id === data.id && drawn.dropped === data.dropped ? alike(drawn.pieces, data.pieces) : 0;
    const last = kept ? data.pieces[kept - 1][0] : -1;
    const follow = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    key(data.counts);
    prompt.textContent = (data.cut ? "… " : "") + data.prompt;
    note.textContent = data.dropped ? ` ${texts.dropped.replace("{n}", data.dropped)} ` : data.pieces.length ? "" : ` ${texts.waiting}`;
    pieces.setAttribute("aria-label", texts.pieces_of.replace("{id}", data.id));
    while (pieces.lastChild && Number(pieces.lastChild.dataset.position) > last) pieces.lastChild.remove();
    pieces.append(...data.pieces.slice(kept).flatMap(elements));
    drawn = data;
    if (follow) text.scrollTop = text.scrollHeight;
    mark();
  }

  function mark() {
    if (!drawn) return;
    const round = model.get("round");
    const selected = model.get("selected");
    for (const chip of pieces.querySelectorAll(".piece")) {
      chip.classList.toggle("of", round >= 0 && chip.ctPiece[3] === round);
      chip.classList.toggle("on", chip.ctPiece[0] === selected);
      chip.setAttribute("aria-selected", String(chip.ctPiece[0] === selected));
    }
    const chip = pieces.querySelector(".piece.on");
    if (!chip) return;
    const top = chip.offsetTop - text.offsetTop;
    if (top < text.scrollTop || top > text.scrollTop + text.clientHeight - 30) text.scrollTop = top - 50;
  }

  function onKey(event) {
    const by = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10 }[event.key];
    if (!by || !drawn.pieces.length) return;
    event.preventDefault();
    event.stopPropagation(); // the arrow keys move time everywhere else
    const at = drawn.pieces.findIndex((piece) => piece[0] === model.get("selected"));
    const next = Math.max(0, Math.min(drawn.pieces.length - 1, at < 0 ? (by < 0 ? drawn.pieces.length - 1 : 0) : at + by));
    if (next !== at) choose(drawn.pieces[next][0]);
  }

  function numbers([p, q, u, accept, rule]) {
    const rows = [];
    if (p !== null && p !== undefined) rows.push([texts.p, significant(p)]);
    if (q !== null && q !== undefined) rows.push([texts.q, significant(q)]);
    if (u !== null && u !== undefined) rows.push([texts.u, significant(u)]);
    if (accept !== null && accept !== undefined) rows.push(rule === "rejection" ? [texts.accept, significant(accept)] : [texts[rule] ?? rule, ""]);
    return rows;
  }

  function bar([, , u, accept, rule]) {
    if (rule !== "rejection" || u === null || u === undefined || accept === null || accept === undefined) return [];
    const made = make("div", "bar");
    const line = make("i");
    line.style.width = `${100 * accept}%`;
    const dart = make("b");
    dart.style.left = `calc(${100 * u}% - 1px)`;
    made.append(line, dart);
    return [made];
  }

  function told(at) {
    const piece = at.ctPiece;
    const [value, kind, facts] = piece ? [piece[1], piece[2], piece[4]] : [at.ctLost[0], at.ctLost[1], at.ctLost[2]];
    const rows = piece ? [[texts.position, piece[0]]] : [];
    rows.push(...numbers(facts));
    if (piece) {
      const gone = piece[5].filter((each) => each[1] === "rejected");
      if (gone.length) rows.push([texts.instead, gone.map((each) => JSON.stringify(each[0])).join(", ")]);
      if (piece[6].length) rows.push([texts.residual, piece[6].map(([t, p]) => `${JSON.stringify(t)} ${significant(p)}`).join("\n")]);
    }
    const list = make("dl");
    for (const [label, each] of rows) list.append(make("dt", "", label), make("dd", "", String(each)));
    tip.replaceChildren(make("b", "", JSON.stringify(value)), make("div", "", texts.kinds[kind]), list, ...bar(facts));
    tip.style.display = "block";
    const from = at.getBoundingClientRect();
    const box = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(from.left - box.left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${from.bottom - box.top + 6}px`;
  }

  body.addEventListener("pointerover", (event) => {
    const at = event.target.closest(".piece, .lost");
    if (at && (at.ctPiece || at.ctLost)) told(at);
    else tip.style.display = "none";
  });
  root.addEventListener("pointerleave", () => { tip.style.display = "none"; });

  const watched = { data: draw, empty: draw, selected: mark, round: mark };
  for (const [name, react] of Object.entries(watched)) model.on(`change:${name}`, react);
  draw();
  return () => {
    for (const [name, react] of Object.entries(watched)) model.off(`change:${name}`, react);
  };
}

export default { render };

// One verification, stage by stage. One ESM file for Panel and for anywidget.
// Python -> here: data = {key, context, nodes: [{text, parent, depth, outcome, p, q, u, accept, pairs: [[text, q, p, drafted]]}], own: {text, kind, u, p} | null, path,
//   chain, rule, residual: [[text, p]], mass, stages: [{show, node, title, words}]}, empty, texts. Nothing goes back.
// Every text is set through textContent. With "reduce motion" nothing slides; the stages are the same.

const CSS = `
.ct-verify { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color);
  --line: color-mix(in srgb, currentColor 14%, transparent); --soft: color-mix(in srgb, currentColor 7%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color));
  --q: #e69f00; --p: #0072b2; --accepted: #009e73; --rejected: #d55e00; }
.ct-verify .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-verify .bar { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; margin-bottom: 10px; }
.ct-verify button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 8px; min-width: 34px; height: 30px; padding: 0 9px; cursor: pointer; } .ct-verify button:hover:not(:disabled) { border-color: currentColor; }
.ct-verify button:disabled { opacity: .4; cursor: default; } .ct-verify input[type=range] { flex: 1 1 120px; min-width: 80px; accent-color: var(--panel-primary-color); } .ct-verify output { font-size: 12px; color: var(--muted); font-variant-numeric: tabular-nums; }
.ct-verify :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-verify .row { display: flex; gap: 6px; overflow-x: auto; padding: 3px 3px 8px; align-items: stretch; scrollbar-width: thin; }
.ct-verify .box { flex: 0 0 auto; min-width: 76px; max-width: 150px; border: 1.5px solid var(--line); border-radius: 8px; padding: 6px 8px; transition: opacity .35s, transform .35s, border-color .35s; box-sizing: border-box; }
.ct-verify .box b { display: block; font: 500 12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; overflow: hidden; text-overflow: ellipsis; }
.ct-verify .box small { display: block; font-size: 11px; color: var(--muted); white-space: nowrap; min-height: 15px; }
.ct-verify .box.context { border-style: dotted; } .ct-verify .box.hidden { opacity: 0; transform: translateY(8px); } .ct-verify .box.focus { border-color: var(--panel-primary-color); box-shadow: 0 0 0 2px color-mix(in srgb, var(--panel-primary-color) 35%, transparent); }
.ct-verify .box.accepted { border-color: var(--accepted); background: color-mix(in srgb, var(--accepted) 14%, transparent); } .ct-verify .box.rejected { border-color: var(--rejected); border-style: dashed; } .ct-verify .box.rejected b, .ct-verify .box.gone b { text-decoration: line-through; }
.ct-verify .box.gone { opacity: .45; border-style: dashed; } .ct-verify .box.own { border: 2.5px double #e69f00; } .ct-verify .box.own.bonus { border: 2px dotted var(--p); }
.ct-verify .pq { display: grid; grid-template-columns: 12px 1fr; gap: 3px 5px; align-items: center; font-size: 10.5px; color: var(--muted); margin-top: 4px; } .ct-verify .track { height: 6px; border-radius: 3px; background: var(--soft); overflow: hidden; }
.ct-verify .fill { height: 100%; transition: width .5s; } .ct-verify .fill.q, .ct-verify .key.q { background: repeating-linear-gradient(90deg, var(--q) 0 4px, color-mix(in srgb, var(--q) 55%, transparent) 4px 6px); } .ct-verify .fill.p, .ct-verify .key.p { background: var(--p); }
.ct-verify .fill.r { background: repeating-linear-gradient(135deg, var(--accepted) 0 4px, color-mix(in srgb, var(--accepted) 50%, transparent) 4px 7px); }
.ct-verify h3 { font-size: 14px; font-weight: 620; margin: 8px 0 2px; white-space: pre-wrap; overflow-wrap: anywhere; } .ct-verify p { margin: 0 0 8px; line-height: 1.5; font-size: 13px; font-variant-numeric: tabular-nums; max-width: 80em; min-height: 3em; overflow-wrap: anywhere; }
.ct-verify .below { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 12px 22px; min-height: 140px; align-content: start; } .ct-verify .what { font-size: 12px; color: var(--muted); margin-bottom: 5px; overflow-wrap: anywhere; }
.ct-verify .stack { position: relative; height: 22px; border-radius: 6px; background: repeating-linear-gradient(135deg, color-mix(in srgb, var(--rejected) 30%, transparent) 0 3px, transparent 3px 7px); margin-top: 16px; } .ct-verify .stack i { position: absolute; inset: 0 auto 0 0; border-radius: 6px; background: color-mix(in srgb, var(--accepted) 60%, transparent); transition: width .5s; }
.ct-verify .dart { position: absolute; top: -12px; width: 0; height: 38px; border-left: 2px solid currentColor; transition: left .6s; } .ct-verify .dart::before { content: ""; position: absolute; left: -7px; top: 0; border: 6px solid transparent; border-top: 9px solid currentColor; }
.ct-verify .scale { display: flex; justify-content: space-between; font-size: 11px; color: var(--muted); margin-top: 4px; } .ct-verify .dart span { position: absolute; top: -4px; left: 8px; font-size: 11px; white-space: nowrap; } .ct-verify .dart.right span { left: auto; right: 10px; }
.ct-verify .pairs { display: grid; grid-template-columns: minmax(50px, 110px) 1fr 58px; gap: 3px 8px; align-items: center; font-size: 12px; } .ct-verify .pairs b { font: 500 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; overflow: hidden; text-overflow: ellipsis; } .ct-verify .pairs b.on { outline: 1.5px solid currentColor; border-radius: 3px; }
.ct-verify .pairs .two { display: grid; gap: 2px; } .ct-verify .pairs span { text-align: right; font-variant-numeric: tabular-nums; font-size: 11px; line-height: 1.15; white-space: pre; } .ct-verify .key { display: inline-block; width: 14px; height: 8px; border-radius: 2px; margin: 0 4px 0 10px; }
@media (max-width: 700px) { .ct-verify .below { grid-template-columns: minmax(0, 1fr); } }
@media (prefers-reduced-motion: reduce) { .ct-verify * { transition: none !important; } }
`;
const STAGE_MS = 2600;
const flat = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥"));
const shown = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(3))));
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const SIGN = { accepted: "✓", rejected: "✕", "not reached": "–" };

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-verify");
  const body = make("div");
  root.append(make("style", "", CSS), body);
  el.append(root);
  let key = null, at = 0, timer = null, parts = null;

  function button(sign, label, act) {
    const made = make("button", "", sign);
    made.type = "button";
    made.title = label;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  }

  function stop() {
    clearInterval(timer);
    timer = null;
  }
  function go(stage) {
    at = Math.max(0, Math.min(model.get("data").stages.length - 1, stage));
    paint();
  }
  function play() {
    if (timer) {
      stop();
      paint();
      return;
    }
    const last = model.get("data").stages.length - 1;
    if (at >= last) at = 0;
    timer = setInterval(() => {
      if (at >= model.get("data").stages.length - 1) stop();
      else at += 1;
      paint();
    }, STAGE_MS);
    paint();
  }

  function frame() {
    const data = model.get("data");
    const bar = make("div", "bar");
    const slider = make("input");
    slider.type = "range";
    slider.min = 0;
    slider.setAttribute("aria-label", texts.stages);
    slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
    slider.addEventListener("keydown", (event) => { if (event.key.startsWith("Arrow")) event.stopPropagation(); }); // they move time everywhere else
    const back = button("◀", texts.back, () => { stop(); go(at - 1); });
    const playing = button("▶▶", texts.play, play);
    const on = button("▶", texts.next, () => { stop(); go(at + 1); });
    const output = make("output");
    bar.append(back, playing, on, slider, output);
    const row = make("div", "row");
    row.tabIndex = 0;
    const context = make("div", "box context");
    context.append(make("small", "", texts.last), make("b", "", `…${flat(data.context.slice(-14))}`));
    const boxes = data.nodes.map(nodeBox);
    const own = data.own ? make("div", `box own ${data.own.kind}`) : null;
    if (own) own.append(make("small", "", texts[data.own.kind] ?? ""), make("b", "", flat(data.own.text)));
    row.append(context, ...boxes, ...(own ? [own] : []));
    const title = make("h3"), words = make("p"), below = make("div", "below");
    words.setAttribute("aria-live", "polite");
    body.replaceChildren(bar, row, title, words, below);
    parts = { slider, back, playing, on, output, row, boxes, own, title, words, below };
  }

  function nodeBox(node, i) {
    const box = make("div", "box");
    const state = make("small");
    const pq = make("div", "pq");
    const bars = {};
    for (const name of ["q", "p"]) {
      const track = make("div", "track");
      bars[name] = make("div", `fill ${name}`);
      track.append(bars[name]);
      pq.append(make("span", "", name), track);
    }
    const place = model.get("data").chain ? `${i + 1}` : `${i + 1} ← ${node.parent < 0 ? "·" : node.parent + 1}`;
    box.append(state, make("b", "", flat(node.text)), pq);
    box.ct = { state, bars, place };
    return box;
  }

  function paint() {
    const data = model.get("data");
    if (!data.stages) {
      stop();
      key = null;
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    if (data.key !== key) {
      stop();
      key = data.key;
      at = 0;
      frame();
    }
    at = Math.min(at, data.stages.length - 1);
    const stage = data.stages[at];
    const past = data.stages.slice(0, at + 1);
    const done = new Set(past.filter((s) => s.show === "test").map((s) => s.node));
    const verified = at >= 1, end = stage.show === "end", ownNow = past.some((s) => s.show === "own");
    parts.boxes.forEach((box, i) => {
      const node = data.nodes[i];
      const told = done.has(i) || end;
      box.className = `box${told ? (node.outcome === "not reached" ? " gone" : ` ${node.outcome}`) : ""}${end && node.outcome === "rejected" ? " gone" : ""}${stage.node === i ? " focus" : ""}`;
      box.ct.state.textContent = told ? `${box.ct.place} ${SIGN[node.outcome]} ${texts[node.outcome]}` : `${box.ct.place} ${texts.node}`;
      box.ct.bars.q.style.width = `${100 * (node.q ?? 0)}%`;
      box.ct.bars.p.style.width = `${verified ? 100 * (node.p ?? 0) : 0}%`;
    });
    if (parts.own) parts.own.classList.toggle("hidden", !ownNow);
    const focused = stage.show === "own" || end ? parts.own ?? parts.boxes[stage.node] : parts.boxes[stage.node];
    if (focused) parts.row.scrollLeft = Math.max(0, focused.offsetLeft - parts.row.offsetLeft - parts.row.clientWidth / 2);
    else parts.row.scrollLeft = 0;
    parts.title.textContent = stage.title;
    parts.words.textContent = stage.words;
    parts.below.replaceChildren(...detail(data, stage));
    parts.slider.max = data.stages.length - 1;
    parts.slider.value = at;
    parts.output.textContent = fill(texts.stage, { n: at + 1, all: data.stages.length });
    parts.slider.setAttribute("aria-valuetext", `${parts.output.textContent}: ${stage.title}`);
    parts.back.disabled = at === 0;
    parts.on.disabled = at >= data.stages.length - 1;
    parts.playing.textContent = timer ? "❚❚" : "▶▶";
    parts.playing.title = timer ? texts.pause : texts.play;
    parts.playing.setAttribute("aria-label", parts.playing.title);
  }

  function detail(data, stage) {
    if (stage.show === "test") return [line(data, data.nodes[stage.node]), places(data.nodes[stage.node])];
    if (stage.show === "own" && data.own.kind === "corrected") {
      const rejected = [...data.nodes].reverse().find((node) => node.outcome === "rejected");
      const left = data.residual.length ? [bars(fill(texts.residual, { mass: shown(data.mass) }), data.residual, data.own.text)] : [];
      return [...left, ...(rejected ? [places(rejected)] : [])];
    }
    return [];
  }

  function line(data, node) {
    const made = make("div");
    const sure = data.rule === "rejection" && node.q !== null;
    made.append(make("div", "what", fill(sure ? texts.accept : texts.own_draw, { a: shown(node.accept) })));
    const stack = make("div", "stack");
    const area = make("i");
    area.style.width = `${100 * (node.accept ?? 0)}%`;
    stack.append(area);
    if (sure && node.u !== null) {
      const dart = make("div", `dart${node.u > 0.7 ? " right" : ""}`);
      dart.style.left = `calc(${100 * node.u}% - 1px)`;
      dart.append(make("span", "", `u = ${shown(node.u)}`));
      stack.append(dart);
    }
    const scale = make("div", "scale");
    for (const mark of ["0", "0.5", "1"]) scale.append(make("span", "", mark));
    made.append(stack, scale);
    return made;
  }

  function places(node) {
    const made = make("div");
    const what = make("div", "what", `${texts.place}:`);
    what.append(make("i", "key q"), texts.drafted, make("i", "key p"), texts.target);
    const list = make("div", "pairs");
    const most = Math.max(1e-9, ...node.pairs.flatMap(([, q, p]) => [q ?? 0, p ?? 0]));
    for (const [text, q, p, drafted] of node.pairs) {
      const two = make("div", "two");
      for (const [name, value] of [["q", q], ["p", p]]) {
        const track = make("div", "track"), inner = make("div", `fill ${name}`);
        inner.style.width = `${(100 * (value ?? 0)) / most}%`;
        track.append(inner);
        two.append(track);
      }
      list.append(make("b", drafted ? "on" : "", flat(text)), two, make("span", "", `${shown(q)}\n${shown(p)}`));
    }
    made.append(what, list);
    return made;
  }

  function bars(label, entries, chosen) {
    const made = make("div");
    const list = make("div", "pairs");
    const most = Math.max(1e-9, ...entries.map((each) => each[1]));
    for (const [text, p] of entries) {
      const track = make("div", "track"), inner = make("div", "fill r");
      inner.style.width = `${(100 * p) / most}%`;
      track.append(inner);
      list.append(make("b", text === chosen ? "on" : "", flat(text)), track, make("span", "", shown(p)));
    }
    made.append(make("div", "what", label), list);
    return made;
  }

  model.on("change:data", paint);
  model.on("change:empty", paint);
  paint();
  return () => {
    stop();
    model.off("change:data", paint);
    model.off("change:empty", paint);
  };
}

export default { render };

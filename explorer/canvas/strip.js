// One request's tokens in a row, and the alternatives of the chosen one. One ESM file for Panel and for anywidget.
// Python -> here: data = {id, prompt, inherited, dropped, tokens: [[position, text, step, logprob, rank, entropy, nucleus]]}, selected,
//   alternatives = {position, token, items: [[id, text, p]], branch}, empty, texts. Here -> Python: action = {seq, kind: "select" | "branch", ...}.
// Every text is set through textContent: what a model or a user wrote is never markup.

const CSS = `
.ct-strip { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-strip .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-strip .text { line-height: 1.9; max-height: 11.4em; overflow-y: auto; overflow-wrap: anywhere; white-space: pre-wrap; }
.ct-strip .prompt, .ct-strip .note { color: var(--muted); } .ct-strip .inherited { border-bottom: 2px dotted var(--line); }
.ct-strip .chips { border-radius: 4px; }
.ct-strip .chip { border-radius: 4px; padding: 2px 1px; margin: 0 1px; cursor: pointer; background: color-mix(in srgb, #56b4e9 var(--s, 0%), transparent); border-bottom: 1px solid var(--line); }
.ct-strip .chip:hover { outline: 1.5px solid color-mix(in srgb, currentColor 50%, transparent); } .ct-strip .chip.on { outline: 2px solid #d55e00; }
.ct-strip .chip.nl { color: var(--muted); font-size: .85em; }
.ct-strip :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-strip .others { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-top: 10px; padding-top: 10px; border-top: 1px solid var(--line); font-size: 13px; min-height: 30px; }
.ct-strip .others > span { color: var(--muted); margin-right: 2px; }
.ct-strip .others b, .ct-strip .others button b { font: 500 12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
.ct-strip .others button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 99px; padding: 3px 11px; cursor: pointer; font-variant-numeric: tabular-nums; max-width: 100%; overflow: hidden; text-overflow: ellipsis; }
.ct-strip .others button:not(:disabled):hover { border-color: currentColor; } .ct-strip .others button:disabled { cursor: default; opacity: .8; } .ct-strip .others small { color: var(--muted); margin-left: 5px; font-size: 12px; }
.ct-strip .legend { display: flex; gap: 3px 8px; flex-wrap: wrap; align-items: center; color: var(--muted); font-size: 12px; margin-bottom: 6px; } .ct-strip .legend .chip { cursor: default; padding: 1px 7px; color: var(--panel-on-surface-color); }
.ct-strip .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 280px; padding: 8px 11px; border-radius: 9px; font-size: 12.5px; line-height: 1.5;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
.ct-strip .tip dl { display: grid; grid-template-columns: auto auto; gap: 0 12px; margin: 4px 0 0; } .ct-strip .tip dt { color: var(--muted); } .ct-strip .tip dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
`;
const OPEN = 6; // nats of entropy from which on the shade is the strongest
const shade = (nats) => `${Math.round((72 * Math.min(OPEN, Math.max(0, nats))) / OPEN)}%`;
const visible = (text) => text.replace(/\r?\n/g, "↵\n").replace(/\t/g, "⇥\t");
const marked = (text) => (text === "" ? "∅" : text.replace(/ /g, "·").replace(/\r?\n/g, "↵"));
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.0001 ? `${(100 * p).toPrecision(2)} %` : "< 0.01 %");

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-strip");
  const body = make("div");
  const tip = make("div", "tip");
  root.append(make("style", "", CSS), body, tip);
  el.append(root);
  let seq = model.get("action")?.seq ?? 0;
  const act = (kind, values) => {
    model.set("action", { seq: ++seq, kind, ...values });
    model.save_changes();
  };
  let drawn = null; // {id, dropped, inherited, tokens}: what chips holds
  let text, note, inherited, prompt, chips, others;

  function frame() {
    const legend = make("div", "legend");
    legend.append(make("span", "", texts.legend));
    for (const nats of [0, 1.5, 3, OPEN]) {
      const chip = make("span", "chip", nats === OPEN ? `≥ ${nats} nat` : `${nats} nat`);
      chip.style.setProperty("--s", shade(nats));
      legend.append(chip);
    }
    text = make("div", "text");
    prompt = make("span", "prompt");
    note = make("span", "note");
    inherited = make("span", "inherited");
    inherited.title = texts.inherited;
    chips = make("span", "chips");
    chips.tabIndex = 0;
    chips.setAttribute("role", "listbox");
    chips.addEventListener("keydown", onKey);
    chips.addEventListener("click", (event) => {
      const token = event.target.ctToken;
      if (token) choose(token[0]);
    });
    text.append(prompt, note, inherited, chips);
    others = make("div", "others");
    body.replaceChildren(legend, text, others);
  }
  const choose = (position) => act("select", { position });

  function chipOf(token) {
    const chip = make("span", "chip", visible(token[1]));
    if (/^[\r\n\t ]+$/.test(token[1]) && token[1].includes("\n")) chip.classList.add("nl");
    if (token[5] !== null) chip.style.setProperty("--s", shade(token[5]));
    chip.ctToken = token;
    chip.dataset.position = token[0];
    chip.setAttribute("role", "option");
    return chip;
  }

  function draw() {
    const data = model.get("data");
    tip.style.display = "none";
    if (!data.tokens) {
      drawn = null;
      body.replaceChildren(make("div", "empty", model.get("empty")));
      return;
    }
    if (!drawn) frame();
    // What stays as it was keeps its element: a click on it, begun before, still counts. (The newest text may change: half a character.)
    const kept = drawn && drawn.id === data.id && drawn.dropped === data.dropped ? alike(drawn.tokens, data.tokens) : 0;
    const follow = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    prompt.textContent = data.prompt;
    inherited.textContent = data.inherited;
    note.textContent = data.dropped ? ` ${texts.dropped.replace("{n}", data.dropped)} ` : data.tokens.length ? "" : ` ${texts.waiting}`;
    chips.setAttribute("aria-label", texts.tokens_of.replace("{id}", data.id));
    while (chips.children.length > kept) chips.lastChild.remove();
    chips.append(...data.tokens.slice(kept).map(chipOf));
    drawn = data;
    if (follow) text.scrollTop = text.scrollHeight;
    mark();
    alternatives();
  }

  function mark() {
    if (!drawn) return;
    for (const on of chips.querySelectorAll(".on")) on.classList.remove("on");
    const chip = chips.querySelector(`[data-position="${model.get("selected")}"]`);
    if (!chip) return;
    chip.classList.add("on");
    const top = chip.offsetTop - text.offsetTop;
    if (top < text.scrollTop || top > text.scrollTop + text.clientHeight - 24) text.scrollTop = top - 40;
  }

  function alternatives() {
    if (!drawn) return;
    const { position, token, items, branch } = model.get("alternatives");
    others.replaceChildren();
    if (token === undefined) return;
    const said = make("span");
    const [before, after] = texts.instead.split("{token}");
    said.append(before, make("b", "", marked(token)), after ?? "");
    others.append(said);
    if (!items.length) others.append(make("span", "", texts.none));
    for (const [id, alternative, p] of items) {
      const button = make("button");
      button.type = "button";
      button.disabled = !branch;
      button.title = texts.branch.replace("{token}", JSON.stringify(alternative));
      button.setAttribute("aria-label", button.title);
      button.append(make("b", "", marked(alternative)), make("small", "", percent(p)));
      button.addEventListener("click", () => act("branch", { position, token: id }));
      others.append(button);
    }
  }

  function onKey(event) {
    const by = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10 }[event.key];
    if (!by || !drawn.tokens.length) return;
    event.preventDefault();
    event.stopPropagation(); // the arrow keys move time everywhere else
    const at = drawn.tokens.findIndex((token) => token[0] === model.get("selected"));
    const next = Math.max(0, Math.min(drawn.tokens.length - 1, at < 0 ? (by < 0 ? drawn.tokens.length - 1 : 0) : at + by));
    if (next !== at) act("select", { position: drawn.tokens[next][0] });
  }

  body.addEventListener("pointerover", (event) => {
    const token = event.target.ctToken;
    if (!token) { tip.style.display = "none"; return; }
    const [position, value, step, logprob, rank, entropy, nucleus] = token;
    const rows = [[texts.position, position], [texts.step, step]];
    if (logprob !== null) rows.push([texts.prob, `${(100 * Math.exp(logprob)).toPrecision(3)} %`]);
    if (rank > 0) rows.push([texts.rank, rank]);
    if (entropy !== null) rows.push([texts.entropy, `${entropy.toFixed(3)} nat`]);
    if (nucleus > 0) rows.push([texts.nucleus, nucleus.toLocaleString("en")]);
    const list = make("dl");
    for (const [label, each] of rows) list.append(make("dt", "", label), make("dd", "", String(each)));
    tip.replaceChildren(make("b", "", JSON.stringify(value)), list);
    tip.style.display = "block";
    const at = event.target.getBoundingClientRect();
    const box = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${at.bottom - box.top + 6}px`;
  });
  body.addEventListener("pointerleave", () => { tip.style.display = "none"; });

  const watched = { data: draw, empty: draw, selected: mark, alternatives };
  for (const [name, react] of Object.entries(watched)) model.on(`change:${name}`, react);
  draw();
  return () => {
    for (const [name, react] of Object.entries(watched)) model.off(`change:${name}`, react);
  };
}

export default { render };

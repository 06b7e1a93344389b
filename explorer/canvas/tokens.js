// Answers as they stream: one card a request, one chip a token. One ESM file for Panel and for anywidget.
// Python -> here: messages {ops: [[name, ...], ...]}. Here -> Python: action = {seq, kind, ...}.
// Every text is set through textContent: what a model or a user wrote is never markup.

const MAX_CHIPS = 1500; // a card draws this many of its newest tokens and says so
const FOLDED = 130; // characters of a folded prompt
const CSS = `
.ct-tokens { position: relative; font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color);
  --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-tokens .cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 12px; align-items: start; }
.ct-tokens .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-tokens article { border: 1px solid var(--line); border-radius: 10px; overflow: clip; min-width: 0; content-visibility: auto; contain-intrinsic-size: auto 160px; }
.ct-tokens article.selected { border-color: var(--panel-primary-color); box-shadow: 0 0 0 1px var(--panel-primary-color); }
.ct-tokens header { display: flex; align-items: center; gap: 8px; padding: 6px 6px 6px 12px; border-bottom: 1px solid var(--line); min-height: 32px; }
.ct-tokens header .dot { width: 10px; height: 10px; border-radius: 3px; flex: none; }
.ct-tokens header .name { font: inherit; font-weight: 600; background: none; border: 0; padding: 2px; color: inherit; cursor: pointer; white-space: nowrap; }
.ct-tokens header .who { color: var(--muted); font-size: 12.5px; flex: none; max-width: 9em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.ct-tokens header .status { margin-left: auto; font-size: 12.5px; color: var(--muted); white-space: nowrap; min-width: 0; overflow: hidden; text-overflow: ellipsis; font-variant-numeric: tabular-nums; padding-right: 6px; }
.ct-tokens header .status.error { color: color-mix(in srgb, #d55e00 70%, currentColor); font-weight: 600; white-space: normal; }
.ct-tokens header .stop { flex: none; font: inherit; font-size: 12.5px; color: inherit; background: none; border: 1px solid var(--line); border-radius: 7px; padding: 3px 10px; cursor: pointer; }
.ct-tokens header .stop:hover { background: color-mix(in srgb, currentColor 8%, transparent); }
.ct-tokens .body { padding: 9px 12px 11px; max-height: 15.5em; overflow-y: auto; line-height: 1.75; overflow-wrap: anywhere; }
.ct-tokens .prompt { color: var(--muted); white-space: pre-wrap; font-size: 13px; line-height: 1.5; margin-bottom: 6px; max-height: 7.5em; overflow: hidden; display: flex; flex-direction: column; justify-content: flex-end; }
.ct-tokens .prompt.open { max-height: none; }
.ct-tokens .note { color: var(--muted); font-size: 12.5px; }
.ct-tokens .chips { white-space: pre-wrap; border-radius: 4px; }
.ct-tokens .chip { border-radius: 3px; padding: 1px 0; margin: 0 .5px; cursor: default; background: color-mix(in srgb, #e69f00 var(--s, 0%), transparent); }
.ct-tokens .chip:hover, .ct-tokens .chip.on { outline: 1.5px solid var(--panel-primary-color); }
.ct-tokens .chip.nl { color: var(--muted); font-size: .85em; }
.ct-tokens .chip[hidden] { display: none; }
.ct-tokens :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 1px; }
.ct-tokens .legend { display: flex; align-items: center; flex-wrap: wrap; gap: 4px 10px; margin: 0 0 12px; color: var(--muted); font-size: 12.5px; }
.ct-tokens .legend .chip { padding: 1px 7px; color: var(--panel-on-surface-color); cursor: help; }
.ct-tokens .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 280px; padding: 9px 12px; border-radius: 9px; font-size: 12.5px; line-height: 1.5;
  background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
.ct-tokens .tip b { font: 600 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.ct-tokens .tip dl { display: grid; grid-template-columns: auto auto; gap: 0 12px; margin: 4px 0 0; } .ct-tokens .tip dt { color: var(--muted); }
.ct-tokens .tip dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
`;

// Surprise in bits, 10 bits and more being the strongest shade.
const shade = (logprob) => `${Math.round(6 * Math.min(10, Math.max(0, -logprob / Math.LN2)))}%`;
const visible = (text) => text.replace(/\r?\n/g, "↵\n").replace(/\t/g, "⇥\t");

function render({ model, el }) {
  const texts = model.get("texts");
  const root = make("div", "ct-tokens");
  const style = make("style", "", CSS);
  const legend = make("div", "legend");
  const empty = make("div", "empty", texts.empty);
  const cards = make("div", "cards");
  const tip = make("div", "tip");
  tip.setAttribute("role", "status");
  root.append(style, legend, empty, cards, tip);
  el.append(root);
  legend.append(make("span", "", texts.legend));
  for (const p of [1, 0.5, 0.1, 0.01, 0.001]) {
    const chip = make("span", "chip", p >= 0.01 ? `${100 * p} %` : "≤ 0.1 %");
    chip.style.setProperty("--s", shade(Math.log(p)));
    legend.append(chip);
  }

  const requests = new Map(); // id -> {card, chips, body, status, tokens: [[id, text, logprob, position, step, ms, rank]], first}
  let shown = null; // the step shown, null when live
  let selected = [null, null];
  let seq = model.get("action")?.seq ?? 0; // a second drawing goes on counting, or its first action would look like no change
  const act = (kind, values = {}) => {
    model.set("action", { seq: ++seq, kind, ...values });
    model.save_changes();
  };

  function addRequest(facts) {
    const card = make("article");
    card.setAttribute("aria-label", facts.label);
    const header = make("header");
    const dot = make("span", "dot");
    dot.style.background = facts.colour;
    const name = make("button", "name", facts.label);
    name.type = "button";
    name.title = texts.select;
    name.addEventListener("click", () => act("select", { id: facts.id, index: null }));
    const status = make("span", "status");
    header.append(dot, name, make("span", "who", facts.who), status);
    let stop = null;
    if (facts.mine) {
      stop = make("button", "stop", texts.stop);
      stop.type = "button";
      stop.title = texts.stop_hint;
      stop.addEventListener("click", () => act("stop", { id: facts.id }));
      header.append(stop);
    }
    const body = make("div", "body");
    // Folded, a long prompt shows its end: prompts that share a long beginning differ there.
    const folded = facts.prompt.length > FOLDED ? `… ${facts.prompt.slice(-FOLDED)}` : facts.prompt;
    const prompt = make("div", "prompt", folded);
    prompt.title = texts.prompt;
    prompt.addEventListener("click", () => {
      prompt.textContent = prompt.classList.toggle("open") ? facts.prompt : folded;
    });
    const note = make("div", "note", facts.before);
    note.hidden = !facts.before;
    const chips = make("div", "chips");
    chips.tabIndex = 0;
    chips.setAttribute("role", "listbox");
    chips.setAttribute("aria-label", texts.tokens_of.replace("{request}", facts.label));
    body.append(prompt, note, chips);
    card.append(header, body);
    const entry = { id: facts.id, card, chips, body, note, status, stop, tokens: [], first: 0, dropped: 0, cursor: -1 };
    chips.ctRequest = entry;
    chips.addEventListener("keydown", (event) => onChipKey(event, entry));
    chips.addEventListener("blur", hideTip);
    requests.set(facts.id, entry);
    cards.prepend(card);
    empty.hidden = true;
  }

  function addTokens(id, tokens) {
    const entry = requests.get(id);
    if (!entry) return;
    const { body, chips } = entry;
    const follow = body.scrollHeight - body.scrollTop - body.clientHeight < 40;
    const part = document.createDocumentFragment();
    for (const token of tokens) {
      const chip = make("span", "chip", visible(token[1]));
      if (/^[\r\n\t ]+$/.test(token[1]) && token[1].includes("\n")) chip.classList.add("nl");
      chip.style.setProperty("--s", token[2] === null ? "0%" : shade(token[2]));
      if (shown !== null && token[4] > shown) chip.hidden = true;
      chip.ctIndex = entry.dropped + entry.tokens.length;
      chip.setAttribute("role", "option");
      entry.tokens.push(token);
      part.append(chip);
    }
    chips.append(part);
    if (entry.tokens.length > MAX_CHIPS * 1.2) {
      const surplus = entry.tokens.length - MAX_CHIPS;
      for (let i = 0; i < surplus; i++) chips.firstChild.remove();
      entry.tokens.splice(0, surplus);
      entry.dropped += surplus;
      entry.note.hidden = false;
      entry.note.textContent = texts.dropped.replace("{n}", entry.dropped);
    }
    if (follow) body.scrollTop = body.scrollHeight;
  }

  // The tokens of a request are others than those told before: a beam that took another one's place.
  function retell(id, tokens) {
    const entry = requests.get(id);
    if (!entry) return;
    hideTip();
    entry.chips.replaceChildren();
    Object.assign(entry, { tokens: [], dropped: 0, cursor: -1 });
    entry.note.hidden = true;
    addTokens(id, tokens);
    select(...selected);
  }

  function setStatus(id, text, running, error, there) {
    const entry = requests.get(id);
    if (!entry) return;
    entry.status.textContent = entry.status.title = text;
    entry.status.classList.toggle("error", error);
    entry.card.hidden = !there;
    if (entry.stop) entry.stop.hidden = !running;
  }

  function showStep(step) {
    shown = step;
    for (const entry of requests.values()) {
      let i = 0;
      for (const chip of entry.chips.children) chip.hidden = step !== null && entry.tokens[i++][4] > step;
    }
  }

  function select(id, index) {
    for (const on of root.querySelectorAll(".chip.on, article.selected")) on.classList.remove("on", "selected");
    selected = [id, index];
    const entry = id !== null && requests.get(id);
    if (!entry) return;
    entry.card.classList.add("selected");
    if (index === null) return;
    const at = entry.tokens.findIndex((token) => token[3] === index);
    entry.chips.children[at]?.classList.add("on");
  }

  function reset() {
    requests.clear();
    cards.replaceChildren();
    empty.hidden = false;
    hideTip();
  }

  // Hover, or the keyboard inside a card, shows the numbers behind a chip.
  function showTip(entry, chip) {
    const token = entry.tokens[chip.ctIndex - entry.dropped];
    if (!token) return;
    const [tokenId, text, logprob, position, step, ms, rank] = token;
    const rows = [[texts.id, tokenId], [texts.position, position], [texts.step, step]];
    if (logprob !== null) {
      rows.push([texts.logprob, `${logprob.toFixed(3)} nat`], [texts.prob, `${(100 * Math.exp(logprob)).toPrecision(3)} %`]);
    }
    if (rank > 0) rows.push([texts.rank, rank]);
    rows.push([texts.ms, `${ms.toFixed(1)} ms`]);
    const list = make("dl");
    for (const [label, value] of rows) list.append(make("dt", "", label), make("dd", "", String(value)));
    tip.replaceChildren(make("b", "", JSON.stringify(text)), list);
    tip.style.display = "block";
    const at = chip.getBoundingClientRect();
    const box = root.getBoundingClientRect();
    const left = Math.max(0, Math.min(at.left - box.left, box.width - tip.offsetWidth));
    const below = at.bottom - box.top + 6;
    const fits = at.bottom + tip.offsetHeight + 12 < window.innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${fits ? below : at.top - box.top - tip.offsetHeight - 6}px`;
  }
  function hideTip() { tip.style.display = "none"; }
  const chipOf = (event) => (event.target instanceof Element && event.target.classList.contains("chip") ? event.target : null);
  const entryOf = (chip) => chip.parentElement?.ctRequest;
  cards.addEventListener("pointerover", (event) => {
    const chip = chipOf(event);
    if (chip && entryOf(chip)) showTip(entryOf(chip), chip);
    else hideTip();
  });
  cards.addEventListener("pointerleave", hideTip);
  cards.addEventListener("click", (event) => {
    const chip = chipOf(event);
    const entry = chip && entryOf(chip);
    if (entry) choose(entry, chip.ctIndex - entry.dropped);
  });
  function choose(entry, at) {
    const token = entry.tokens[at];
    if (!token) return;
    const same = selected[0] === entry.id && selected[1] === token[3];
    act("select", same ? { id: null, index: null } : { id: entry.id, index: token[3] });
  }
  function onChipKey(event, entry) {
    const by = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10 }[event.key];
    const count = entry.chips.children.length;
    if (by && count) {
      entry.cursor = Math.max(0, Math.min(count - 1, entry.cursor + by));
      const chip = entry.chips.children[entry.cursor];
      chip.scrollIntoView({ block: "nearest" });
      showTip(entry, chip);
    } else if (event.key === "Enter" && entry.cursor >= 0) choose(entry, entry.cursor);
    else return;
    event.preventDefault();
    event.stopPropagation(); // the arrow keys move time everywhere else
  }

  const ops = {
    reset,
    request: addRequest,
    tokens: addTokens,
    retell,
    status: setStatus,
    step: showStep,
    select,
    drop(id) {
      requests.get(id)?.card.remove();
      requests.delete(id);
      empty.hidden = requests.size > 0;
    },
  };
  const onMessage = (message) => {
    for (const [name, ...values] of message.ops ?? []) ops[name]?.(...values);
  };
  model.on("msg:custom", onMessage);
  act("ready");
  return () => model.off("msg:custom", onMessage);
}

export default { render };

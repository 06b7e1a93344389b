// The schedule: slots over steps or wall time, tokens of each step, the queue. One ESM file for Panel and for anywidget.
// Fills are in schedule_paint.js, the tracks in schedule_draw.js. Python -> here: see schedule.py; bytes: u32 before, after, steps, cells, JSON bytes, 0; f64 start, end of each step;
// u32 step, cells, waiting, running, budget, max_num_seqs of each; u32 slot | phase << 16, request, tokens, first position of each cell; JSON.
// Here -> Python: action = {seq, kind: "select", request} | {seq, kind: "goto", step}; axis; resync.

const KEEP = 3000, SPANS = [20, 40, 60, 90, 120, 180, 240, 360, 600, 1000, 2000];

function unpack(view) {
  const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const [before, after, count, cells, json] = new Uint32Array(bytes, 0, 5);
  const times = new Float64Array(bytes, 24, 2 * count), rows = new Uint32Array(bytes, 24 + 16 * count, 6 * count);
  const first = 24 + 40 * count, all = new Uint32Array(bytes, first, 4 * cells);
  const more = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, first + 16 * cells, json)));
  const steps = [];
  for (let i = 0, at = 0; i < count; i += 1) {
    const [step, n, waiting, running, budget, slots] = rows.subarray(6 * i, 6 * i + 6);
    steps.push({ step, t0: times[2 * i], t1: times[2 * i + 1], waiting, running, budget, slots, cells: all.subarray(at, at + 4 * n) });
    at += 4 * n;
  }
  return { before, after, steps, ...more };
}

class Schedule extends Tracks {
  constructor(model, el) {
    super();
    this.model = model;
    this.texts = model.get("texts");
    this.span = 120;
    this.frames = this.pending = 0;
    this.pointed = null;  // [step index, slot or -1, track]
    this.off = [];
    this.build(el);
    this.theme();
    this.forget();
    this.take();
    const on = (name, react) => { model.on(`change:${name}`, react); this.off.push(() => model.off(`change:${name}`, react)); };
    on("steps", () => this.take());
    on("more", () => this.takeMore());
    for (const name of ["at", "live", "selected", "extent", "empty"]) on(name, () => this.redraw());
    on("axis", () => { this.press(); this.redraw(); });
  }

  build(el) {
    const root = this.root = add(el, "div", "ct-sched");
    add(root, "style", "", STYLE);
    const bar = add(root, "div", "bar");
    this.keys = PHASES.map((phase) => {
      const key = add(bar, "span", "key"), swatch = add(key, "canvas");
      swatch.width = 44;
      swatch.height = 26;
      add(key, "span", "", this.texts.phases[phase]);
      return swatch;
    });
    const tools = add(bar, "span", "tools");
    const button = (text, label, act) => {
      const made = add(tools, "button", "", text);
      made.type = "button";
      made.title = label;
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
      return made;
    };
    this.axes = ["steps", "time"].map((axis) => button(this.texts[axis], `${this.texts.axis}: ${this.texts[axis]}`, () => {
      this.model.set("axis", axis);
      this.model.save_changes();
      this.press();
      this.redraw();
    }));
    this.zoomers = [button("+", this.texts.fewer, () => this.zoom(-1)), button("−", this.texts.more, () => this.zoom(1))];
    this.none = add(root, "div", "none");
    this.canvas = add(root, "canvas", "map");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.cutaway = this;  // for tests: the data behind the pixels
    this.ctx = this.canvas.getContext("2d");
    this.tip = add(root, "div", "tip");
    this.tip.hidden = true;
    this.said = add(root, "div", "sr");
    this.said.setAttribute("role", "status");
    const c = this.canvas;
    c.addEventListener("pointermove", (e) => this.point(this.under(e), e));
    c.addEventListener("pointerleave", () => this.point(null));
    c.addEventListener("click", (e) => this.choose(this.under(e)));
    c.addEventListener("dblclick", (e) => { const at = this.under(e); if (at) this.tell("goto", { step: this.steps[at[0]].step }); });
    c.addEventListener("keydown", (e) => this.key(e));
    c.addEventListener("blur", () => this.point(null));
    this.resizer = new ResizeObserver(() => { if (this.root.clientWidth !== this.width) this.redraw(); });
    this.resizer.observe(root);
    this.themes = new MutationObserver(() => { this.theme(); this.redraw(); });
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-mui-color-scheme", "theme"] });
    this.press();
  }

  theme() {
    this.paint = new Paint(this.root, this.model.get("colours"));
    this.keys.forEach((swatch, phase) => {
      const ctx = swatch.getContext("2d");
      ctx.setTransform(2, 0, 0, 2, 0, 0);
      ctx.clearRect(0, 0, 22, 13);
      this.paint.bar(ctx, phase, 0, 0, 22, 13);
    });
  }

  press() { this.axes.forEach((button, i) => button.setAttribute("aria-pressed", String((this.model.get("axis") === "time") === (i === 1)))); }

  zoom(by) {
    const at = SPANS.findIndex((n) => n >= this.span);
    this.span = SPANS[Math.max(0, Math.min(SPANS.length - 1, (at < 0 ? SPANS.length - 1 : at) + by))];
    this.redraw();
  }

  // -- data ----------------------------------------------------------------------------------------------------------------

  forget() {
    this.steps = [];
    this.bars = [];  // of each slot, in order: {i0, i1, t0, t1, phase, request, low, high}; low, high: its part of the row's height
    this.names = {};
    this.marks = [];
    this.seq = -1;
  }

  take() {
    const view = this.model.get("steps");
    this.forget();
    if (view && view.byteLength) {
      const got = unpack(view);
      this.seq = got.after;
      this.enter(got);
    }
    this.takeMore();
    this.redraw();
  }

  takeMore() {
    const view = this.model.get("more");
    if (!view || !view.byteLength) return;
    const got = unpack(view);
    if (got.after <= this.seq) return;  // older than what is shown
    if (got.before !== this.seq) {
      this.model.set("resync", (this.model.get("resync") || 0) + 1);
      this.model.save_changes();
      return;
    }
    this.seq = got.after;
    this.enter(got);
    this.redraw();
  }

  enter({ steps, names, marks }) {
    Object.assign(this.names, names);
    this.marks.push(...marks);
    for (const step of steps) {
      this.addBars(step, this.steps.length);
      this.steps.push(step);
    }
    if (this.steps.length > KEEP + 500) {  // anew from what is kept
      this.steps = this.steps.slice(-KEEP);
      this.bars = [];
      this.steps.forEach((step, i) => this.addBars(step, i));
      this.marks = this.marks.filter(([at]) => at >= this.steps[0].step);
    }
  }

  addBars(step, i) {
    const whole = new Map(), last = i ? this.steps[i - 1] : null, { cells } = step;
    step.tokens = step.padding = 0;
    for (let c = 0; c < cells.length; c += 4) {
      const slot = cells[c] & 0xffff;
      whole.set(slot, (whole.get(slot) || 0) + cells[c + 2]);
      step.tokens += cells[c + 2];
      if (cells[c] >> 16 === PADDING) step.padding += cells[c + 2];
    }
    const joined = last && step.t0 - last.t1 < Math.max(0.004, 0.5 * (step.t1 - step.t0)), filled = new Map();
    for (let c = 0; c < cells.length; c += 4) {
      const slot = cells[c] & 0xffff, phase = cells[c] >> 16, request = cells[c + 1], all = whole.get(slot);
      const low = all ? (filled.get(slot) || 0) / all : 0, high = all ? low + cells[c + 2] / all : 1;
      filled.set(slot, (filled.get(slot) || 0) + cells[c + 2]);
      while (this.bars.length <= slot) this.bars.push([]);
      const row = this.bars[slot], before = row[row.length - 1];
      if (joined && before && before.i1 === i && before.phase === phase && before.request === request && low === 0 && high === 1 && before.high - before.low === 1) {
        before.i1 = i + 1;
        before.t1 = step.t1;
      } else row.push({ i0: i, i1: i + 1, t0: step.t0, t1: step.t1, phase, request, low, high });
    }
  }

  // -- what is seen ----------------------------------------------------------------------------------------------------------

  // [first step's index, one more than the last one's]
  window() {
    const n = this.steps.length, extent = this.model.get("extent");
    if (extent.length) return [0, n];
    let end = n;
    if (!this.model.get("live")) {
      const at = this.indexOf(this.model.get("at"));
      end = Math.min(n, Math.max(at + 1 + Math.floor(0.3 * this.span), Math.min(n, this.span)));
    }
    return [Math.max(0, end - this.span), end];
  }

  indexOf(step) {  // of the last step up to this one
    let low = 0, high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].step <= step) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  redraw() { if (!this.pending) this.pending = requestAnimationFrame(() => this.frame()); }

  frame() {
    this.pending = 0;
    this.width = this.root.clientWidth || 640;
    const none = !this.steps.length;
    this.none.hidden = !none;
    this.canvas.hidden = none;
    for (const button of this.zoomers) button.hidden = this.model.get("extent").length > 0;
    if (none) {
      this.none.textContent = this.model.get("empty");
      return;
    }
    const l = this.l = this.layout(), height = l.bottom + AXIS, dpr = window.devicePixelRatio || 1, ctx = this.ctx;
    if (this.canvas.width !== Math.round(this.width * dpr) || this.canvas.height !== Math.round(height * dpr)) {
      this.canvas.width = Math.round(this.width * dpr);
      this.canvas.height = Math.round(height * dpr);
      this.canvas.style.height = `${height}px`;
    }
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, this.width, height);
    ctx.font = "11px system-ui, sans-serif";
    this.drawSlots(ctx, l);
    this.drawTokens(ctx, l);
    this.drawQueue(ctx, l);
    this.drawAxis(ctx, l);
    this.drawHere(ctx, l);
    this.frames += 1;
    const label = this.texts.what.replace("{slots}", l.slots).replace("{first}", this.steps[l.from].step).replace("{last}", this.steps[l.to - 1].step);
    if (label !== this.label && !this.later) this.later = setTimeout(() => { this.later = 0; this.canvas.setAttribute("aria-label", (this.label = label)); }, 500);
  }

  // -- the pointer and the keys --------------------------------------------------------------------------------------------------

  under(event) {
    const l = this.l;
    if (!l || event.offsetX < l.left || !this.steps.length) return null;
    let i = -1;
    for (let j = l.from; j < l.to; j += 1) if (l.x0(j) <= event.offsetX) i = j;
    if (i < 0 || event.offsetX > l.x1(i) + 6) return null;
    const y = event.offsetY;
    if (y < l.y.slots + l.slots * l.height) return [i, Math.max(0, Math.min(l.slots - 1, Math.floor((y - l.y.slots) / l.height))), "slots"];
    return [i, -1, y < l.y.tokens + TOKENS + 4 ? "tokens" : "queue"];
  }

  cellsAt([i, slot]) {
    const { cells } = this.steps[i], found = [];
    for (let c = 0; c < cells.length; c += 4) if ((cells[c] & 0xffff) === slot) found.push([cells[c] >> 16, cells[c + 1], cells[c + 2], cells[c + 3]]);
    return found;
  }

  describe(at) {
    const step = this.steps[at[0]], t = this.texts, lines = [`${t.step} ${step.step} · ${t.took.replace("{ms}", (1000 * (step.t1 - step.t0)).toFixed(1))}`];
    const name = (request) => this.names[request] || `#${request}`;
    const pad = (n) => (n === 1 ? t.padded_one : t.padded.replace("{n}", n));
    const where = (n, first) => (n === 1 ? t.position.replace("{first}", first) : t.positions.replace("{first}", first).replace("{last}", first + n - 1).replace("{n}", n));
    if (at[2] === "slots") {
      const cells = this.cellsAt(at);
      if (!cells.length) lines.push(`${t.slot} ${at[1]}: ${t.idle}`);
      for (const [phase, request, n, first] of cells) lines.push(`${t.slot} ${at[1]}: ${name(request)}, ${t.phases[PHASES[phase]]}${n ? (phase === PADDING ? `, ${pad(n)}` : `, ${where(n, first)}`) : ""}`);
      return lines;
    }
    if (at[2] === "queue") return [...lines, `${t.waiting} ${step.waiting} · ${t.running} ${step.running}`];
    lines.push(t.of_budget.replace("{n}", step.tokens).replace("{budget}", step.budget));
    const { cells } = step;
    let decodes = 0, prefills = 0;
    for (let c = 0; c < cells.length; c += 4) {
      if (cells[c] >> 16 === DECODE) decodes += 1;
      else if (cells[c] >> 16 === PREFILL) {
        prefills += 1;
        if (prefills <= 6) lines.push(`${name(cells[c + 1])}, ${t.phases.prefill}, ${where(cells[c + 2], cells[c + 3])}`);
      }
    }
    if (prefills > 6) lines.push(t.and_more.replace("{n}", prefills - 6));
    if (decodes) lines.push(t.decodes.replace("{n}", decodes));
    if (step.padding) lines.push(pad(step.padding));
    return lines;
  }

  point(at, event = null) {
    this.pointed = at;
    this.tip.hidden = !at;
    this.redraw();
    if (!at) return;
    const lines = this.describe(at), box = this.canvas.getBoundingClientRect(), l = this.l;
    this.tip.textContent = lines.join("\n");
    const x = event ? event.clientX : box.left + l.x1(at[0]), y = event ? event.clientY : box.top + l.y.slots + (at[1] + 1) * l.height;
    const w = this.tip.offsetWidth, h = this.tip.offsetHeight;
    this.tip.style.left = `${Math.max(8, x + 14 + w <= innerWidth - 8 ? x + 14 : x - w - 14)}px`;
    this.tip.style.top = `${y + 14 + h <= innerHeight - 8 ? y + 14 : Math.max(8, y - h - 14)}px`;
    if (!event) this.said.textContent = lines.join("; ");
  }

  tell(kind, more) {
    this.model.set("action", { seq: (this.model.get("action")?.seq ?? 0) + 1, kind, ...more });
    this.model.save_changes();
  }

  choose(at) {
    const cells = at && at[2] === "slots" ? this.cellsAt(at) : [], request = cells.length ? cells[0][1] : -1;
    this.tell("select", { request: request === this.model.get("selected") ? -1 : request });
  }

  key(event) {
    const l = this.l, moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-20, 0], PageDown: [20, 0] };
    if (!l) return;
    if (event.key in moves) {
      const [i, slot] = this.pointed || [l.to - 1, 0], [across, down] = moves[event.key];
      this.point([Math.max(l.from, Math.min(l.to - 1, i + across)), Math.max(0, Math.min(l.slots - 1, slot + down)), "slots"]);
    } else if (event.key === "Enter" && this.pointed) this.choose(this.pointed);
    else if (event.key === "Escape") { this.point(null); this.tell("select", { request: -1 }); }
    else if (event.key === "+" || event.key === "=") this.zoom(-1);
    else if (event.key === "-") this.zoom(1);
    else return;
    event.preventDefault();
    event.stopPropagation();  // the arrow keys move time everywhere else
  }

  remove() {
    for (const off of this.off) off();
    this.resizer.disconnect();
    this.themes.disconnect();
    cancelAnimationFrame(this.pending);
    clearTimeout(this.later);
    this.root.remove();
  }
}

const render = ({ model, el }) => { const made = new Schedule(model, el); return () => made.remove(); };
export default { render };

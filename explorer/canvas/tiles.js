// Attention by tiles, played. One ESM file for Panel and for anywidget; data and painting are in tiles_paint.js.
// Python -> here: tiles (binary), meta, memory, soft, scores (binary), empty, texts. Here -> Python: action = {seq, kind: "look", program}: the program that is looked at.
// Every text is set through textContent.

const RATES = [1, 4, 16, 60, 250, 1000, 5000, 20000];
const six = (x) => (!Number.isFinite(x) ? "–∞" : x === 0 ? "0" : String(Number(x.toPrecision(6))));
const size = (n) => (n < 1024 ? `${n} B` : n < 1048576 ? `${Number((n / 1024).toPrecision(4))} KiB` : `${Number((n / 1048576).toPrecision(4))} MiB`);
const put = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const write = (node, text) => { if (node.textContent !== text) node.textContent = text; };

class Player {
  constructor(model, el) {
    this.model = model;
    this.texts = model.get("texts");
    this.seq = model.get("action")?.seq ?? 0;
    this.root = make("div", "ct-tiles");
    this.body = make("div");
    this.tip = make("div", "tip");
    this.root.append(make("style", "", CSS), this.body, this.tip);
    el.append(this.root);
    this.root.cutaway = this; // for tests: the data behind the pixels
    this.pos = 0; this.plane = 0; this.frames = 0; this.looked = -1; this.timer = 0;
    this.moved = true; // whether meta.at is news: tiles come alone, too
    this.waits = false; // to play on, as soon as both halves are here
    this.build();
    this.resizer = new ResizeObserver(() => { if (this.root.clientWidth !== this.cssWidth) this.again(); });
    this.resizer.observe(this.root);
    this.themes = new MutationObserver(() => this.again());
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-mui-color-scheme", "theme"] });
    this.take();
  }

  build() {
    const t = this.texts, bar = make("div", "bar");
    const button = (sign, label, act) => { const b = add(bar, "button", "", sign); b.type = "button"; b.title = label; b.setAttribute("aria-label", label); b.addEventListener("click", act); return b; };
    button("|◀", t.start, () => this.go(0));
    button("◀", t.back, () => this.go(Math.ceil(this.pos) - 1));
    this.playing = button("▶▶", t.play, () => this.toggle());
    button("▶", t.next, () => this.go(Math.floor(this.pos) + 1));
    button("▶|", t.end, () => this.go(this.data.count));
    this.slider = add(bar, "input");
    this.slider.type = "range"; this.slider.min = 0; this.slider.step = 1;
    this.slider.setAttribute("aria-label", t.place);
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.slider.addEventListener("keydown", (e) => { if (e.key.startsWith("Arrow")) e.stopPropagation(); });
    this.output = add(bar, "output");
    this.speed = add(bar, "select");
    this.speed.setAttribute("aria-label", t.speed);
    RATES.forEach((rate) => { const o = add(this.speed, "option", "", put(t.rate, { n: rate.toLocaleString("en") })); o.value = rate; });
    this.planes = add(bar, "select");
    this.planes.setAttribute("aria-label", t.plane);
    this.planes.addEventListener("change", () => { this.plane = Number(this.planes.value); this.again(); });
    const two = make("div", "two"), left = add(two, "div"), right = add(two, "div");
    this.left = left;
    const canvas = add(left, "canvas", "grid");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", t.grid);
    this.grid = new Grid(canvas);
    add(left, "div", "what", `${t.rows}; ${t.columns}`);
    this.keys = add(left, "div", "keys");
    this.facts = add(right, "div", "facts");
    this.facts.setAttribute("role", "status");
    this.mem = add(right, "div");
    this.ganttHead = make("h3");
    this.ganttHead.style.marginTop = "14px";
    const lanes = make("canvas", "gantt");
    this.gantt = new Gantt(lanes);
    this.softBox = make("div");
    this.softBox.style.marginTop = "16px";
    this.frame = [bar, two, this.ganttHead, lanes, this.softBox];
    this.buildSoft();
    canvas.addEventListener("click", (e) => this.clicked(this.tileOf(e)));
    canvas.addEventListener("pointermove", (e) => this.hover(e));
    canvas.addEventListener("pointerleave", () => { this.tip.style.display = "none"; });
    lanes.addEventListener("click", (e) => this.clicked(this.gantt.at(this.data, e.offsetX, e.offsetY)));
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  buildSoft() {
    add(this.softBox, "h3", "", this.texts.soft);
    this.softWhat = add(this.softBox, "div", "what");
    const two = add(this.softBox, "div", "two");
    const left = add(two, "div"), right = add(two, "div");
    this.softLeft = left;
    this.softCanvas = new Layered(add(left, "canvas"));
    this.softKey = add(left, "div", "what", this.texts.scores);
    this.softTable = add(right, "table");
    this.softSaid = add(right, "div", "said");
  }

  // -- what came from Python -----------------------------------------------------------------------------------------------

  take() {
    const data = this.data = new TileData(this.model.get("tiles")), meta = this.meta = this.model.get("meta");
    const going = this.waits || this.timer !== 0, stands = !this.moved || !(meta.at >= 0);
    this.pause();
    this.looked = -1;
    this.waits = meta.count !== undefined && meta.count !== data.count && going;
    if (meta.count !== undefined && meta.count !== data.count) return; // the other half is on its way
    this.moved = false;
    if (!data.count || !meta.planes) { this.body.replaceChildren(make("div", "empty", this.model.get("empty"))); return; }
    if (this.body.firstChild !== this.frame[0]) this.body.replaceChildren(...this.frame);
    this.slider.max = data.count;
    this.pos = Math.min(stands ? this.pos : meta.at, data.count);
    this.plane = Math.min(this.plane, meta.planes.length - 1);
    this.planes.replaceChildren(...meta.planes.map(([title], i) => { const o = make("option", "", title); o.value = i; return o; }));
    this.planes.style.display = meta.planes.length > 1 ? "" : "none";
    if (!this.rated) this.speed.value = RATES.reduce((best, rate) => (Math.abs(Math.log(rate * 12 / data.count)) < Math.abs(Math.log(best * 12 / data.count)) ? rate : best));
    const clock = meta.clock;
    this.ganttHead.replaceChildren(document.createTextNode(put(this.texts[`lanes_${clock}`], { n: meta.lanes.length.toLocaleString("en") })), make("span", "chip", this.texts[clock]));
    this.follow();
    this.takeMemory();
    this.again();
    this.look();
    if (going && stands && this.pos < data.count) this.play(); // what is known better meanwhile does not stop it
  }

  takeMemory() {
    const t = this.texts;
    this.cells = [];
    this.stages = null;
    this.mem.replaceChildren(...this.model.get("memory").map((bar) => {
      const box = make("div", "mem"), head = add(box, "div", "head");
      const title = add(head, "div", "", t[bar.title]);
      title.append(make("span", "chip", `${bar.sign} ${bar.kind}`));
      add(head, "span", "", bar.used === null ? put(t.of_unknown, { limit: size(bar.limit) }) : put(t.of, { used: size(bar.used), limit: size(bar.limit) }));
      const track = add(box, "div", "track"), list = [];
      const sum = bar.parts.reduce((all, part) => all + part.nbytes, 0);
      for (const part of bar.parts) {
        const kind = part.other ? "other" : part.tile || { acc: "acc", m: "ml", l: "ml", S: "sp", P: "sp", "S, P": "sp" }[part.name] || "";
        for (let c = 0; c < part.copies; c++) {
          const cell = add(track, "div", `part ${kind}`);
          cell.style.width = `${(100 * part.nbytes) / part.copies / Math.max(bar.limit, sum)}%`;
          cell.title = `${part.other ? t.rest : part.name}: ${size(part.nbytes / part.copies)}`;
          const name = add(cell, "b", "", part.other ? "" : part.name), state = add(cell, "span");
          if (part.tile) this.cells.push({ cell, name, state, part, c });
        }
        list.push(`${part.other ? t.rest : part.name} ${part.copies > 1 ? `${part.copies} × ` : ""}${size(part.nbytes / part.copies)}`);
      }
      if (bar.parts.some((part) => part.tile)) this.stages = add(box, "div", "list stages");
      add(box, "div", "list", list.join(" · ") + (bar.used !== null && sum > bar.used ? `. ${t.shares}` : ""));
      return box;
    }));
    this.paint();
  }

  takeSoft() { this.softWords = ""; this.paint(); }

  // -- moving ----------------------------------------------------------------------------------------------------------------

  get now() { return this.data.count ? Math.min(Math.floor(this.pos), this.data.count - 1) : -1; }
  go(at) { this.pause(); this.pos = Math.max(0, Math.min(this.data.count, at)); this.follow(); this.paint(); this.look(); }
  clicked(tile) { if (tile >= 0) { this.pause(); this.pos = tile; this.paint(); this.look(); } }
  toggle() { if (this.timer) { this.pause(); this.look(); } else this.play(); }

  play() {
    if (!this.data.count) return;
    if (this.pos >= this.data.count) this.pos = 0;
    this.playing.textContent = "❚❚";
    this.playing.title = this.texts.pause;
    this.playing.setAttribute("aria-label", this.texts.pause);
    let before = performance.now();
    const frame = (time) => {
      const passed = Math.min(0.25, Math.max(0, (time - before) / 1000));
      before = time;
      this.pos = Math.min(this.data.count, this.pos + passed * Number(this.speed.value));
      this.follow();
      this.paint();
      if (time - (this.lookedAt ?? 0) > 700) { this.lookedAt = time; this.look(); }
      if (this.pos >= this.data.count) { this.pause(); this.look(); } else this.timer = requestAnimationFrame(frame);
    };
    this.timer = requestAnimationFrame(frame);
  }

  pause() {
    this.waits = false;
    if (this.timer) cancelAnimationFrame(this.timer);
    this.timer = 0;
    this.playing.textContent = "▶▶";
    this.playing.title = this.texts.play;
    this.playing.setAttribute("aria-label", this.texts.play);
  }

  // The grid shows the head that is being worked on.
  follow() {
    if (this.now < 0 || this.meta.planes.length < 2) return;
    const plane = this.data.planeOf(this.now);
    if (plane !== this.plane) { this.plane = plane; this.planes.value = plane; this.layGrid(); }
  }

  // Tell Python whose row is looked at, so that it sends its scores.
  look() {
    const program = this.now >= 0 ? this.data.tile.program[this.now] : -1;
    if (program < 0 || program === this.looked) return;
    this.looked = program;
    this.model.set("action", { seq: ++this.seq, kind: "look", program });
    this.model.save_changes();
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (event.key in steps) this.go(Math.floor(this.pos) + steps[event.key]);
    else if (event.key === " ") this.toggle();
    else return;
    event.preventDefault();
    event.stopPropagation(); // they move time everywhere else
  }

  tileOf(event) {
    const cell = this.grid.cellAt(event.offsetX, event.offsetY);
    return cell ? this.data.at(this.plane, ...cell) : -1;
  }

  hover(event) {
    const cell = this.grid.cellAt(event.offsetX, event.offsetY), t = this.texts, data = this.data;
    const row = cell ? data.rowAt(this.plane, cell[0]) : -1;
    if (row < 0 || cell[1] >= data.row.total[row]) { this.tip.style.display = "none"; return; }
    const i = data.at(this.plane, ...cell);
    const why = i >= 0 ? (i < this.now ? t.done : i === this.now ? t.now : t.todo) : cell[1] < data.row.first[row] ? t.window : t.causal;
    const keys = `${cell[1] * this.meta.blockN}–${(cell[1] + 1) * this.meta.blockN - 1}`;
    this.tip.replaceChildren(make("b", "", i >= 0 ? put(t.tile, { i: i + 1 }) : why), make("div", "", `${t.queries} ${data.row.qStart[row]}–${data.row.qStart[row] + data.row.qRows[row] - 1}, ${t.keys} ${keys}`), ...(i >= 0 ? [make("div", "", why)] : []));
    this.tip.style.display = "block";
    const box = this.root.getBoundingClientRect();
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  // -- painting ----------------------------------------------------------------------------------------------------------------

  layGrid() {
    this.grid.painted = -1;
    this.grid.lay(Math.max(60, this.left.clientWidth || 300), this.meta.planes[this.plane]);
  }

  again() {
    this.cssWidth = this.root.clientWidth;
    if (!this.data?.count || !this.meta.planes || !this.cssWidth) return;
    this.root.classList.toggle("wide", this.cssWidth > 700);
    this.hue = new Look(this.root);
    this.layGrid();
    this.gantt.faint = null;
    this.gantt.painted = -1;
    this.gantt.lay(this.cssWidth, this.meta.lanes.length);
    this.paintKeys();
    this.softWords = "";
    this.paint();
  }

  paintKeys() {
    const t = this.texts, look = this.hue;
    const key = (name, draw) => {
      const span = make("span"), c = add(span, "canvas"), ctx = c.getContext("2d");
      c.width = c.height = 28; ctx.scale(2, 2); draw(ctx);
      span.append(document.createTextNode(name));
      return span;
    };
    const full = (fill) => (ctx) => { ctx.fillStyle = fill; ctx.fillRect(0, 0, 14, 14); };
    const there = (name) => { for (let r = 0; r < this.data.rows; r++) if (name === "window" ? this.data.row.first[r] > 0 : this.data.row.stop[r] < this.data.row.total[r]) return true; return false; };
    this.keys.replaceChildren(
      key(t.done, full(look.hue(0))), key(t.now, full(NOW)), key(t.todo, full(look.todo)),
      ...(there("causal") ? [key(t.causal, full(look.causal))] : []), ...(there("window") ? [key(t.window, full(look.window))] : []),
      key(t.masked, (ctx) => { full(look.hue(0))(ctx); ctx.fillStyle = css(look.paper); ctx.globalAlpha = 0.6; ctx.beginPath(); ctx.moveTo(14, 0); ctx.lineTo(14, 6.5); ctx.lineTo(7.5, 0); ctx.fill(); }),
    );
  }

  paint() {
    if (!this.hue || !this.data.count || !this.grid.width) return;
    const now = this.pos >= this.data.count ? -1 : this.now, done = Math.floor(this.pos);
    this.grid.paint(this.data, this.plane, this.hue, done, now);
    this.gantt.paint(this.data, this.hue, done, now);
    this.frames += 1;
    if (this.slider.value !== String(done)) this.slider.value = done;
    write(this.output, put(this.texts.at, { i: done.toLocaleString("en"), n: this.data.count.toLocaleString("en") }));
    this.paintFacts();
    this.paintStages();
    this.paintSoft();
  }

  paintFacts() {
    const { data, texts: t } = this, i = this.now, { tile, program: p, row: r } = data;
    if (this.factsOf === i && this.factsData === data) return;
    this.factsOf = i; this.factsData = data;
    const program = tile.program[i], row = p.row[program], known = Number.isFinite(tile.m[i]) || Number.isFinite(tile.l[i]);
    const lines = [
      [t.program, `${p.x[program]}, ${p.y[program]}, ${p.z[program]}`], [t.queries, `${r.qStart[row]}–${r.qStart[row] + r.qRows[row] - 1}`],
      [t.keys, `${tile.k[i] * this.meta.blockN}–${tile.k[i] * this.meta.blockN + tile.keys[i] - 1}`], [t.head, String(r.head[row])],
      [t.loaded, size(tile.bytes[i])], [t.is_masked, tile.masked[i] ? t.yes : t.no],
      [t.m, known ? six(tile.m[i]) : t.unknown], [t.l, known ? six(tile.l[i]) : t.unknown],
    ];
    if (this.meta.clock === "time") lines.push([t.sm, String(p.sm[program])], [t.from, `${six(tile.start[i] / 1000)}–${six(tile.end[i] / 1000)} µs`]);
    if (!this.factsList) {
      this.factsTitle = add(this.facts, "h3");
      this.factsList = add(this.facts, "dl");
    }
    write(this.factsTitle, put(t.tile, { i: (i + 1).toLocaleString("en") }));
    if (this.factsList.children.length !== 2 * lines.length) this.factsList.replaceChildren(...lines.flatMap(() => [make("dt"), make("dd")]));
    lines.forEach(([name, value], at) => { write(this.factsList.children[2 * at], name); write(this.factsList.children[2 * at + 1], value); });
  }

  // Which tile of keys each stage holds: the one in use, and those that the pipeline of the same loop has begun to load.
  paintStages() {
    const { data, texts: t } = this, i = this.now, mine = data.of(data.tile.program[i]), place = mine.indexOf(i), said = [];
    for (const { cell, name, state, part, c } of this.cells ?? []) {
      const ahead = (c - (place % part.copies) + part.copies) % part.copies, other = mine[place + ahead];
      const there = other !== undefined && data.tile.masked[other] === data.tile.masked[i];
      cell.classList.toggle("use", ahead === 0);
      cell.classList.toggle("loading", there && ahead > 0);
      cell.classList.toggle("idle", !there);
      write(name, there ? `${part.name} ${data.tile.k[other]}` : part.name);
      write(state, there ? "" : "–");
      said.push(there ? `${part.name} ${data.tile.k[other]} ${ahead === 0 ? t.in_use : t.loading}` : `${part.name} ${t.empty}`);
    }
    if (this.stages) write(this.stages, said.join(" · "));
  }

  paintSoft() {
    const { data, texts: t } = this, soft = this.model.get("soft"), program = data.tile.program[this.now], mine = data.of(program);
    const done = mine.reduce((n, i) => n + (i < Math.floor(this.pos) ? 1 : 0), 0), key = `${program} ${done} ${soft.program ?? -1} ${this.cssWidth} ${this.hue.dark}`;
    if (key === this.softWords || this.timer && program !== soft.program) return;
    this.softWords = key;
    const row = new Float32Array(bufferOf(this.model.get("scores"))), there = soft.program === program && soft.count === row.length, last = mine[done - 1];
    const states = there ? running(row, mine.slice(0, done).map((i) => [data.tile.k[i] * this.meta.blockN, data.tile.keys[i]])) : [];
    const recorded = last !== undefined && (Number.isFinite(data.tile.m[last]) || data.tile.l[last] === 0);
    const m = last === undefined ? -Infinity : recorded ? data.tile.m[last] : states.at(-1)?.[0] ?? NaN, l = last === undefined ? 0 : recorded ? data.tile.l[last] : states.at(-1)?.[1] ?? NaN;
    const before = done > 1 ? (recorded ? data.tile.m[mine[done - 2]] : states.at(-2)?.[0]) : -Infinity;
    const r = data.program.row[program];
    write(this.softWhat, put(t.soft_row, { row: there ? soft.row : `${data.row.qStart[r]}+`, head: data.row.head[r], i: done, n: mine.length }));
    const rows = [["", "m", "l", t.log_sum], [t.so_far, six(m), six(l), six(m + Math.log(l))]];
    if (there) rows.push([t.full, six(soft.max), six(soft.sum), six(soft.max + Math.log(soft.sum))]);
    const line = (cells, tag) => { const made = make("tr"); cells.forEach((cell) => add(made, tag, "", cell)); return made; };
    this.softTable.replaceChildren(...rows.map((cells, i) => line(cells, i ? "td" : "th")));
    const off = there ? Math.abs(l * Math.exp(m - soft.max) / soft.sum - 1) : 0, ended = done === mine.length;
    const said = !there ? t.no_soft : !done ? t.not_begun : ended ? put(off < 5e-6 ? t.equal : t.off, { off: `${(100 * off).toExponential(1)} %` }) : `${t.rescale} exp(m_old − m) = ${six(before === -Infinity ? 0 : Math.exp(before - m))}`;
    this.softSaid.className = there && ended && off < 5e-6 ? "said good" : "said";
    write(this.softSaid, said);
    this.softLeft.style.display = there ? "" : "none";
    if (there) this.paintScores(row, states, done < mine.length ? data.tile.k[mine[done]] * this.meta.blockN : row.length);
  }

  paintScores(row, states, end) {
    const c = this.softCanvas, width = Math.max(60, this.softLeft.clientWidth), height = 96;
    c.size(width, height);
    const ctx = c.ctx, look = this.hue;
    ctx.setTransform(c.dpr, 0, 0, c.dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    let low = Infinity, high = -Infinity;
    for (const s of row) if (Number.isFinite(s)) { low = Math.min(low, s); high = Math.max(high, s); }
    const y = (s) => 6 + (1 - (s - low) / (high - low || 1)) * (height - 12), w = width / row.length;
    for (let n = 0; n < row.length; n++) {
      if (!Number.isFinite(row[n])) continue;
      ctx.fillStyle = n < end ? look.hue(0) : look.todo;
      ctx.fillRect(n * w, y(row[n]), Math.max(w - (w > 3 ? 1 : 0), 0.8), height - y(row[n]));
    }
    ctx.strokeStyle = look.line; ctx.lineWidth = 0.5;
    for (let n = this.meta.blockN; n < row.length; n += this.meta.blockN) { ctx.beginPath(); ctx.moveTo(n * w, 0); ctx.lineTo(n * w, height); ctx.stroke(); }
    ctx.strokeStyle = NOW; ctx.lineWidth = 2; ctx.beginPath();
    states.forEach(([m, , from, keys], i) => { if (!Number.isFinite(m)) return; ctx[i ? "lineTo" : "moveTo"](from * w, y(m)); ctx.lineTo((from + keys) * w, y(m)); });
    ctx.stroke();
  }

  remove() {
    this.pause();
    this.resizer.disconnect();
    this.themes.disconnect();
  }
}

// The online softmax over spans of a row: [m, l, first key, keys] after each.
function running(row, spans) {
  let m = -Infinity, l = 0;
  return spans.map(([from, keys]) => {
    let top = m, sum = 0;
    for (let n = from; n < from + keys; n++) top = Math.max(top, row[n]);
    for (let n = from; n < from + keys; n++) if (row[n] > -Infinity) sum += Math.exp(row[n] - top);
    l = (m > -Infinity ? l * Math.exp(m - top) : 0) + sum;
    m = top;
    return [m, l, from, keys];
  });
}

function render({ model, el }) {
  const player = new Player(model, el);
  player.speed.addEventListener("change", () => { player.rated = true; });
  const watched = { meta: () => { player.moved = true; player.take(); }, tiles: () => player.take(), memory: () => player.takeMemory(), soft: () => player.takeSoft(), scores: () => player.takeSoft(), empty: () => player.take() };
  for (const [name, react] of Object.entries(watched)) model.on(`change:${name}`, react);
  return () => {
    for (const [name, react] of Object.entries(watched)) model.off(`change:${name}`, react);
    player.remove();
  };
}

export default { render };

// The map of all physical KV blocks on a canvas. One file for Panel (AnyWidgetComponent) and notebooks (anywidget).
// Cells are drawn by blockmap_paint.js.
//
// model: full    bytes: u32 seq, u32 block_size, then one u32 code a block
//        delta   bytes: u32 base_seq, u32 seq, u32 count, count u32 block ids, count u32 codes
//        code    kind | palette index << 8 | references << 16 | fill << 24; kind 0 free, 1 cached, 2 held, 3 shared
//        palette [[light, dark], ...]; marked: u32 block ids of the selected request; selected, hovered: block id or -1
//        detail  {block_id, lines: [text, ...]} answers hovered; resync: raised here when a delta was missed
const SMALL = 6;          // below this cell size (CSS px) blocks are drawn as one image, above it cell by cell
const MAX_CELL = 34, GUTTER = 46, FLASH_MS = 450, FADE_MS = 90, MAX_FLASHES = 600;
const words = (view) => new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + (view.byteLength & ~3)));

class BlockMap {
  constructor(model, el) {
    this.model = model;
    this.codes = new Uint32Array(0);
    this.seq = -1; this.blockSize = 0; this.counts = [0, 0, 0, 0];
    this.zoom = 1; this.ox = 0; this.oy = 0; this.cursor = -1; this.tipBlock = -1;
    this.marked = new Set(); this.dirty = new Set(); this.flash = new Map();
    this.frames = 0; this.whole = true; this.pending = 0; this.said = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.build(el);
    this.readTheme();
    this.takeFull(); this.takeMarked(); this.layout();
    const on = (name, f) => { model.on(`change:${name}`, f); this.off.push(() => model.off(`change:${name}`, f)); };
    this.off = [];
    on("full", () => { this.takeFull(); this.layout(); });
    on("delta", () => this.takeDelta());
    on("palette", () => { this.readTheme(); this.redraw(); });
    on("marked", () => { this.takeMarked(); this.redraw(); });
    on("selected", () => this.redraw());
    on("detail", () => this.fillTip());
    on("canvas_height", () => this.layout());
  }

  build(el) {
    this.root = add(el, "div", "ctw-map");
    add(this.root, "style", "", STYLE);
    const bar = add(this.root, "div", "ctw-bar");
    this.keys = SHORT.map((name) => {
      const key = add(bar, "span", "ctw-key");
      const swatch = add(key, "canvas", "");
      swatch.width = swatch.height = 32;
      add(key, "span", "", name);
      return { key, swatch, count: add(key, "b", "", "0") };
    });
    const zoom = add(bar, "span", "ctw-zoom");
    for (const [text, label, act] of [["−", "Zoom out", () => this.zoomBy(1 / 1.5)], ["+", "Zoom in", () => this.zoomBy(1.5)],
      ["fit", "Show all blocks", () => this.zoomBy(0)]]) {
      const button = add(zoom, "button", "", text);
      button.type = "button"; button.title = label; button.setAttribute("aria-label", label);
      button.addEventListener("click", act);
    }
    this.canvas = add(this.root, "canvas", "map");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "map of KV blocks");
    this.canvas.cutaway = this;  // for tests: the data behind the pixels
    this.ctx = this.canvas.getContext("2d");
    this.image = document.createElement("canvas");  // one pixel a block, for small cells
    this.tip = add(this.root, "div", "ctw-tip");
    this.tip.hidden = true;
    this.live = add(this.root, "div", "ctw-sr");
    this.live.setAttribute("role", "status");
    const c = this.canvas;
    c.addEventListener("pointermove", (e) => this.pointerMove(e));
    c.addEventListener("pointerleave", () => { if (!this.drag) this.hover(-1); });
    c.addEventListener("pointerdown", (e) => { this.drag = { x: e.offsetX, y: e.offsetY, ox: this.ox, oy: this.oy, moved: false }; });
    c.addEventListener("pointerup", (e) => this.pointerUp(e));
    c.addEventListener("pointercancel", () => { this.drag = null; });
    c.addEventListener("wheel", (e) => {
      if (!e.ctrlKey) return;  // a plain wheel scrolls the page
      e.preventDefault();
      this.zoomBy(e.deltaY < 0 ? 1.25 : 0.8, e.offsetX, e.offsetY);
    }, { passive: false });
    c.addEventListener("keydown", (e) => this.key(e));
    c.addEventListener("blur", () => { this.cursor = -1; this.hover(-1); this.redraw(); });
    this.resizer = new ResizeObserver(() => { if (this.root.clientWidth !== this.cssWidth) this.layout(); });
    this.resizer.observe(this.root);
    this.themes = new MutationObserver(() => { this.readTheme(); this.redraw(); });
    for (const node of [document.documentElement, document.body]) {
      this.themes.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-mui-color-scheme", "theme"] });
    }
  }

  readTheme() {
    const ink = (getComputedStyle(this.root).color.match(/[\d.]+/g) || [30, 30, 30]).slice(0, 3).map(Number);
    const p = this.painter = new BlockPainter(ink, this.model.get("palette") || []);
    this.tip.style.background = css(mix(p.paper, p.ink, p.dark ? 0.14 : 0.02));
    this.tip.style.border = `1px solid ${css(mix(p.paper, p.ink, 0.25))}`;
    this.keys.forEach(({ swatch }, kind) => {
      const ctx = swatch.getContext("2d");
      ctx.setTransform(2, 0, 0, 2, 0, 0);
      ctx.clearRect(0, 0, 16, 16);
      p.cell(ctx, 0, 0, 16, (kind | ((kind === SHARED ? 2 : 1) << 16) | (255 << 24)) >>> 0, false);
    });
  }

  takeFull() {
    const view = this.model.get("full");
    if (!view || view.byteLength < 8) return;
    const all = words(view);
    this.seq = all[0]; this.blockSize = all[1];
    this.codes = all.slice(2);
    this.counts = [0, 0, 0, 0];
    for (const code of this.codes) this.counts[code & 3]++;
    this.flash.clear();
    this.takeDelta(); this.redraw();
  }

  takeDelta() {
    const view = this.model.get("delta");
    if (!view || view.byteLength < 12) return;
    const all = words(view), count = all[2];
    if (all[1] <= this.seq) return;  // older than what is shown
    if (all[0] !== this.seq) {
      this.model.set("resync", (this.model.get("resync") || 0) + 1);
      this.model.save_changes();
      return;
    }
    this.seq = all[1];
    const now = performance.now();
    for (let i = 0; i < count; i++) {
      const block = all[3 + i], code = all[3 + count + i], old = this.codes[block];
      this.counts[old & 3]--; this.counts[code & 3]++;
      this.codes[block] = code;
      this.dirty.add(block);
      if (!this.calm && (old & 0xff00ff) !== (code & 0xff00ff) && this.flash.size < MAX_FLASHES) this.flash.set(block, now);
    }
    this.schedule();
    if (this.tipBlock >= 0) this.askTip();
  }

  takeMarked() {
    const view = this.model.get("marked");
    this.marked = new Set(view && view.byteLength ? words(view) : []);
  }

  // The largest whole cell size at which all blocks fit, then zoom and pan on top of it.
  layout() {
    const width = this.cssWidth = this.root.clientWidth || 640, n = Math.max(1, this.codes.length), limit = this.model.get("canvas_height") || 420;
    this.gutter = width > 480 ? GUTTER : 0;
    const room = width - this.gutter;
    let cell = MAX_CELL;
    while (cell > 1 && Math.ceil(n / Math.floor(room / cell)) * cell > limit) cell--;
    let cols = Math.max(1, Math.min(n, Math.floor(room / cell)));
    if (cell >= 10 && cols > 8 && n > cols) {  // round numbers at the rows' heads, and the whole width
      cols = Math.min(n, Math.ceil(cols / 8) * 8);
      cell = Math.floor(room / cols);
    }
    this.cols = cols; this.rows = Math.ceil(n / cols); this.fit = cell;
    this.cssHeight = Math.max(cell, Math.min(limit, this.rows * cell));
    const dpr = this.dpr = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * dpr); this.canvas.height = Math.round(this.cssHeight * dpr);
    this.canvas.style.height = `${this.cssHeight}px`;
    this.image.width = this.cols; this.image.height = this.rows;
    this.pixelsReady = false;
    this.pixels = new ImageData(this.cols, this.rows);
    this.pixels32 = new Uint32Array(this.pixels.data.buffer);
    this.clampPan(); this.redraw();
  }

  get cell() { return this.fit * this.zoom; }

  clampPan() {
    const c = this.cell;
    this.ox = Math.max(0, Math.min(this.ox, this.cols * c - (this.cssWidth - this.gutter)));
    this.oy = Math.max(0, Math.min(this.oy, this.rows * c - this.cssHeight));
    this.canvas.style.touchAction = this.zoom > 1 ? "none" : "pan-y";
  }

  zoomBy(factor, x = this.cssWidth / 2, y = this.cssHeight / 2) {
    const before = this.cell, px = x - this.gutter + this.ox, py = y + this.oy;
    this.zoom = factor ? Math.max(1, Math.min(this.zoom * factor, 64 / this.fit)) : 1;
    this.ox = px * this.cell / before - (x - this.gutter);
    this.oy = py * this.cell / before - y;
    this.clampPan(); this.redraw();
  }

  redraw() { this.whole = true; this.schedule(); }
  schedule() { if (!this.pending) this.pending = requestAnimationFrame((t) => this.frame(t)); }

  frame(now) {
    this.pending = 0;
    const small = this.cell < SMALL, ctx = this.ctx;
    ctx.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    if (small) this.drawImage(ctx);
    else if (this.whole) this.drawAll(ctx);
    else for (const block of this.dirty) this.drawBlock(ctx, block);
    if (!small) this.drawFlashes(ctx, now);
    else this.flash.clear();
    this.drawRings(ctx);
    this.dirty.clear(); this.whole = false; this.frames++;
    if (now - this.said > 500) { this.said = now; this.drawLegend(); }
    else if (!this.later) this.later = setTimeout(() => { this.later = 0; this.drawLegend(); }, 500);
    // A glow fades in a few steps: sixty a second would keep a browser without a GPU busy for as long as tokens come.
    if (this.flash.size && !this.fading) this.fading = setTimeout(() => { this.fading = 0; this.schedule(); }, FADE_MS);
  }

  drawLegend() {
    this.keys.forEach(({ count }, kind) => { const text = this.counts[kind].toLocaleString("en"); if (count.textContent !== text) count.textContent = text; });
    const label = `${this.codes.length} KV blocks of ${this.blockSize} tokens: ` + SHORT.map((name, k) => `${this.counts[k]} ${name}`).join(", ")
      + ". Arrow keys move, Enter selects, Escape clears, plus and minus zoom.";
    if (label !== this.label) this.canvas.setAttribute("aria-label", this.label = label);
  }

  drawImage(ctx) {
    const faded = this.marked.size > 0, blocks = this.whole || !this.pixelsReady ? this.codes.keys() : this.dirty;
    for (const block of blocks) {
      this.pixels32[block] = this.painter.pixel(this.codes[block], faded && !this.marked.has(block));
    }
    this.pixelsReady = true;
    this.image.getContext("2d").putImageData(this.pixels, 0, 0);
    ctx.clearRect(0, 0, this.cssWidth, this.cssHeight);
    ctx.imageSmoothingEnabled = false;
    ctx.save();
    ctx.beginPath(); ctx.rect(this.gutter, 0, this.cssWidth, this.cssHeight); ctx.clip();
    ctx.drawImage(this.image, this.gutter - this.ox, -this.oy, this.cols * this.cell, this.rows * this.cell);
    ctx.restore();
    this.drawGutter(ctx);
  }

  drawAll(ctx) {
    ctx.clearRect(0, 0, this.cssWidth, this.cssHeight);
    const c = this.cell, r0 = Math.floor(this.oy / c), r1 = Math.min(this.rows, Math.ceil((this.oy + this.cssHeight) / c));
    const c0 = Math.floor(this.ox / c), c1 = Math.min(this.cols, Math.ceil((this.ox + this.cssWidth - this.gutter) / c));
    for (let row = r0; row < r1; row++) for (let col = c0; col < c1; col++) this.drawBlock(ctx, row * this.cols + col);
    if (this.gutter) ctx.clearRect(0, 0, this.gutter, this.cssHeight);
    this.drawGutter(ctx);
  }

  drawGutter(ctx) {
    if (!this.gutter) return;
    const every = Math.max(1, Math.ceil(15 / this.cell));
    ctx.fillStyle = css(mix(this.painter.paper, this.painter.ink, 0.62));
    ctx.font = "11px system-ui, sans-serif"; ctx.textAlign = "right"; ctx.textBaseline = "middle";
    for (let row = 0; row < this.rows; row += every) {
      const y = (row + 0.5) * this.cell - this.oy;
      if (y > 4 && y < this.cssHeight - 4) ctx.fillText(String(row * this.cols), this.gutter - 8, y);
    }
  }

  place(block) {
    const c = this.cell;
    return [this.gutter + (block % this.cols) * c - this.ox, Math.floor(block / this.cols) * c - this.oy, c];
  }

  drawBlock(ctx, block) {
    if (block >= this.codes.length) return;
    const [x, y, c] = this.place(block);
    if (x + c < this.gutter || y + c < 0 || x > this.cssWidth || y > this.cssHeight) return;
    ctx.clearRect(x, y, c, c);
    ctx.globalAlpha = this.marked.size && !this.marked.has(block) ? 0.3 : 1;
    this.painter.cell(ctx, x, y, c, this.codes[block], c >= 15);
    if (c >= 40) {
      ctx.fillStyle = css(this.painter.ink); ctx.font = "9px system-ui, sans-serif"; ctx.textAlign = "left"; ctx.textBaseline = "top";
      ctx.fillText(String(block), x + 5, y + 4);
    }
    ctx.globalAlpha = 1;
  }

  // A block that just changed hands glows for a moment; its cell is redrawn under the glow until it has gone.
  drawFlashes(ctx, now) {
    for (const [block, start] of this.flash) {
      const age = (now - start) / FLASH_MS;
      this.drawBlock(ctx, block);
      if (age >= 1) { this.flash.delete(block); continue; }
      const [x, y, c] = this.place(block);
      if (x < this.gutter || y > this.cssHeight) continue;
      ctx.fillStyle = `rgba(255,255,255,${0.75 * (1 - Math.max(0, age))})`;
      ctx.fillRect(x + 1, y + 1, c - 2, c - 2);
    }
  }

  drawRings(ctx) {
    const ring = (block, width, colour) => {
      if (block < 0 || block >= this.codes.length) return;
      const [x, y, c] = this.place(block), s = Math.max(c, 7);
      if (x < this.gutter - 1) return;
      ctx.strokeStyle = css(this.painter.paper); ctx.lineWidth = width + 2; ctx.strokeRect(x + (c - s) / 2 + 1, y + (c - s) / 2 + 1, s - 2, s - 2);
      ctx.strokeStyle = colour; ctx.lineWidth = width; ctx.strokeRect(x + (c - s) / 2 + 1, y + (c - s) / 2 + 1, s - 2, s - 2);
    };
    const selected = this.model.get("selected");
    ring(selected ?? -1, 2.5, css(this.painter.ink));
    if (this.cursor >= 0 && this.cursor !== selected) ring(this.cursor, 1.5, css(mix(this.painter.ink, this.painter.paper, 0.15)));
  }

  blockAt(e) {
    const col = Math.floor((e.offsetX - this.gutter + this.ox) / this.cell), row = Math.floor((e.offsetY + this.oy) / this.cell);
    const block = row * this.cols + col;
    const inside = e.offsetX >= this.gutter && col >= 0 && col < this.cols && row >= 0 && block < this.codes.length;
    return inside ? block : -1;  // also where the map has no size yet and nothing is a number
  }

  pointerMove(e) {
    const d = this.drag;
    if (d && e.buttons && this.zoom > 1) {
      if (Math.hypot(e.offsetX - d.x, e.offsetY - d.y) > 4) d.moved = true;
      if (d.moved) {
        this.ox = d.ox - (e.offsetX - d.x); this.oy = d.oy - (e.offsetY - d.y);
        this.clampPan(); this.hover(-1); this.redraw();
        return;
      }
    }
    this.hover(this.blockAt(e));
  }

  pointerUp(e) {
    const moved = this.drag && this.drag.moved;
    this.drag = null;
    if (!moved) this.select(this.blockAt(e));
  }

  select(block) {
    this.model.set("selected", block === this.model.get("selected") ? -1 : block);
    this.model.save_changes();
    this.redraw();
  }

  hover(block, byKey = false) {
    if (block === this.tipBlock) return;
    this.tipBlock = block; this.byKey = byKey;
    if (block < 0) {
      this.tip.hidden = true;
      clearTimeout(this.asking); this.asking = 0;
      this.model.set("hovered", -1); this.model.save_changes();
      return;
    }
    this.fillTip();
    this.askTip();
  }

  askTip() {  // at most 20 questions a second
    if (this.asking) return;
    this.asking = setTimeout(() => {
      this.asking = 0;
      if (this.tipBlock < 0) return;
      this.model.set("hovered", this.tipBlock); this.model.save_changes();
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => {  // an answer that was lost on its way is asked for again
        if (this.tipBlock < 0 || (this.model.get("detail") || {}).block_id === this.tipBlock) return;
        this.model.set("hovered", -1); this.model.save_changes();
        this.askTip();
      }, 1000);
    }, 50);
  }

  fillTip() {
    const block = this.tipBlock;
    if (block < 0 || block >= this.codes.length) return;
    const code = this.codes[block], detail = this.model.get("detail") || {};
    const lines = detail.block_id === block ? detail.lines : [`${NAMES[code & 255]}, ref_count ${(code >> 16) & 255}`];
    this.tip.textContent = "";
    add(this.tip, "b", "", `block ${block}`);
    this.tip.appendChild(document.createTextNode(lines.join("\n")));
    this.tip.hidden = false;
    // Fixed to the window, since the card around the map clips what hangs over.
    const [x, y, c] = this.place(block), box = this.canvas.getBoundingClientRect(), w = this.tip.offsetWidth, h = this.tip.offsetHeight;
    const right = box.left + x + c + 8, below = box.top + y + c + 6;
    const left = right + w <= innerWidth - 8 ? right : box.left + x - w - 8;
    this.tip.style.left = `${Math.max(8, Math.min(left, innerWidth - w - 8))}px`;
    this.tip.style.top = `${below + h <= innerHeight - 8 ? below : Math.max(8, box.top + y - h - 6)}px`;
    if (this.byKey && detail.block_id === block) this.live.textContent = `block ${block}: ${lines.join("; ")}`;
  }

  key(e) {
    const n = this.codes.length, page = this.cols * Math.max(1, Math.floor(this.cssHeight / this.cell) - 1);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.cols, ArrowDown: this.cols, PageUp: -page, PageDown: page, Home: -n, End: n };
    if (e.key in moves && n) {
      this.cursor = this.cursor < 0 ? Math.max(0, this.model.get("selected")) : Math.max(0, Math.min(n - 1, this.cursor + moves[e.key]));
      this.reveal(this.cursor);
      this.hover(this.cursor, true);
      this.redraw();
    } else if (e.key === "Enter" || e.key === " ") { if (this.cursor >= 0) this.select(this.cursor); }
    else if (e.key === "Escape") { this.cursor = -1; this.hover(-1); this.select(-1); }
    else if (e.key === "+" || e.key === "=") this.zoomBy(1.5);
    else if (e.key === "-") this.zoomBy(1 / 1.5);
    else if (e.key === "0") this.zoomBy(0);
    else return;
    e.preventDefault(); e.stopPropagation();  // the transport bar listens to the same keys
  }

  reveal(block) {
    const [x, y, c] = this.place(block);
    if (x < this.gutter) this.ox -= this.gutter - x; else if (x + c > this.cssWidth) this.ox += x + c - this.cssWidth;
    if (y < 0) this.oy += y; else if (y + c > this.cssHeight) this.oy += y + c - this.cssHeight;
    this.clampPan();
  }

  remove() {
    this.off.forEach((f) => f());
    this.resizer.disconnect(); this.themes.disconnect();
    cancelAnimationFrame(this.pending); clearTimeout(this.later); clearTimeout(this.fading); clearTimeout(this.asking); clearTimeout(this.waiting);
    this.root.remove();
  }
}

const render = ({ model, el }) => { const map = new BlockMap(model, el); return () => map.remove(); };
export default { render };

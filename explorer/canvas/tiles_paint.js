// The tiles of an attention kernel: what was recorded, and how grid and lanes are painted. Put in front of tiles.js (see tiles.py).
// Wire format of `tiles`, 32-bit words: [T, P, R], then columns. Of T tiles: program, k (tile of keys), keys, bytes, masked, and as floats m, l, start, end.
// Of P programs: row, x, y, z, lane, bytes loaded, bytes stored, SM. Of R rows of the picture: plane, index, first, stop, total, first query, queries, head, request.
const TILE_WORDS = ["program", "k", "keys", "bytes", "masked"], TILE_FLOATS = ["m", "l", "start", "end"];
const PROGRAM_WORDS = ["row", "x", "y", "z", "lane", "loaded", "stored", "sm"];
const ROW_WORDS = ["plane", "index", "first", "stop", "total", "qStart", "qRows", "head", "request"];
// Of programs, light and dark: neighbours differ. Grid and lanes have the same.
const HUES = [["#0072b2", "#56b4e9"], ["#e69f00", "#e6b044"], ["#009e73", "#2fbf95"], ["#cc79a7", "#d795bb"], ["#6a5acd", "#9b8ff0"], ["#8c5a2b", "#bd8a5a"]];
const NOW = "#d55e00";

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
const css = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;
const bufferOf = (view) => (!view ? new ArrayBuffer(0) : view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

class TileData {
  constructor(view) {
    const words = new Uint32Array(bufferOf(view)), floats = new Float32Array(words.buffer);
    const [T, P, R] = words.length >= 3 ? words : [0, 0, 0];
    let at = 3;
    const take = (from, names, count) => Object.fromEntries(names.map((name) => { const column = from.subarray(at, at + count); at += count; return [name, column]; }));
    this.count = T;
    this.tile = { ...take(words, TILE_WORDS, T), ...take(floats, TILE_FLOATS, T) };
    this.program = take(words, PROGRAM_WORDS, P);
    this.row = take(words, ROW_WORDS, R);
    this.programs = P;
    this.rows = R;
    this.first = 0; this.last = 1;
    for (let i = 0; i < T; i++) { if (i === 0 || this.tile.start[i] < this.first) this.first = this.tile.start[i]; if (this.tile.end[i] > this.last) this.last = this.tile.end[i]; }
    this.members = null;
  }

  // The tiles of a program, in order.
  of(program) {
    if (!this.members) {
      this.members = Array.from({ length: this.programs }, () => []);
      for (let i = 0; i < this.count; i++) this.members[this.tile.program[i]].push(i);
    }
    return this.members[program] ?? [];
  }

  planeOf(i) { return this.row.plane[this.program.row[this.tile.program[i]]]; }

  // The tile at a cell; -1: none was done.
  at(plane, index, k) {
    if (this.atPlane !== plane) {
      this.atPlane = plane;
      this.cells = new Map();
      for (let i = 0; i < this.count; i++) if (this.planeOf(i) === plane) this.cells.set(this.row.index[this.program.row[this.tile.program[i]]] * 65536 + this.tile.k[i], i);
    }
    return this.cells.get(index * 65536 + k) ?? -1;
  }

  rowAt(plane, index) {
    for (let r = 0; r < this.rows; r++) if (this.row.plane[r] === plane && this.row.index[r] === index) return r;
    return -1;
  }
}

class Look {
  constructor(root) {
    this.ink = (getComputedStyle(root).color.match(/[\d.]+/g) || [30, 30, 30]).slice(0, 3).map(Number);
    this.dark = this.ink[0] * 0.3 + this.ink[1] * 0.59 + this.ink[2] * 0.11 > 128;
    this.paper = this.dark ? [22, 25, 29] : [255, 255, 255];
    this.hues = HUES.map((pair) => pair[this.dark ? 1 : 0]);
    this.todo = css(mix(this.paper, this.ink, this.dark ? 0.13 : 0.08));
    this.line = css(mix(this.paper, this.ink, 0.3));
    this.causal = this.stripes(1);
    this.window = this.stripes(-1);
  }

  stripes(slope) {
    const tile = document.createElement("canvas"), ctx = tile.getContext("2d");
    tile.width = tile.height = 8;
    ctx.strokeStyle = css(mix(this.paper, this.ink, 0.34)); ctx.lineWidth = 1.2;
    for (const shift of [-8, 0, 8]) { ctx.beginPath(); ctx.moveTo(shift, slope > 0 ? 8 : 0); ctx.lineTo(shift + 8, slope > 0 ? 0 : 8); ctx.stroke(); }
    return ctx.createPattern(tile, "repeat");
  }

  hue(program) { return this.hues[program % this.hues.length]; }
}

// A canvas whose lasting part (a layer) is painted once: each frame adds the tiles that were done since.
class Layered {
  constructor(canvas) {
    this.canvas = canvas;
    this.ctx = canvas.getContext("2d");
    this.layer = document.createElement("canvas");
    this.ink = this.layer.getContext("2d");
    this.painted = -1;
  }

  size(width, height) {
    const dpr = this.dpr = Math.min(2, window.devicePixelRatio || 1);
    if (this.width === width && this.height === height && this.canvas.width === Math.round(width * dpr)) return;
    this.width = width; this.height = height;
    for (const c of [this.canvas, this.layer]) { c.width = Math.round(width * dpr); c.height = Math.round(height * dpr); }
    this.canvas.style.width = `${width}px`; this.canvas.style.height = `${height}px`;
    this.painted = -1;
  }

  // Paint the layer up to `done` tiles: `ground` all that is there before the first, `cell` one tile.
  upTo(done, ground, cell) {
    const ink = this.ink;
    ink.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    if (this.painted < 0 || done < this.painted) { ink.clearRect(0, 0, this.width, this.height); ground(ink); this.painted = 0; }
    for (; this.painted < done; this.painted++) cell(ink, this.painted);
    this.ctx.setTransform(1, 0, 0, 1, 0, 0);
    this.ctx.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.ctx.drawImage(this.layer, 0, 0);
    this.ctx.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
  }
}

class Grid extends Layered {
  // plane: [title, rows, columns]
  lay(width, plane) {
    const [, rows, columns] = plane;
    const cell = Math.min(width / columns, 420 / rows, 44), high = rows < 4 ? Math.max(cell, 16) : cell;
    this.rows = rows; this.columns = columns;
    this.cw = rows < 4 || columns > 2 * rows ? Math.min(width / columns, 44) : cell;
    this.ch = Math.min(high, 420 / rows);
    this.size(Math.max(1, this.cw * columns), Math.max(1, this.ch * rows));
  }

  box(index, k) {
    const gap = Math.min(this.cw, this.ch) >= 7 ? 1 : 0;
    return [k * this.cw + gap / 2, index * this.ch + gap / 2, Math.max(this.cw - gap, 0.75), Math.max(this.ch - gap, 0.75)];
  }

  ground(ink, data, plane, look) {
    for (let r = 0; r < data.rows; r++) {
      if (data.row.plane[r] !== plane) continue;
      const index = data.row.index[r], total = data.row.total[r];
      const span = (from, to, fill) => {
        if (to <= from) return;
        ink.fillStyle = fill;
        if (this.cw < 7) { const [x, y] = this.box(index, from); ink.fillRect(x, y, (to - from) * this.cw, this.ch); return; }
        for (let k = from; k < to; k++) ink.fillRect(...this.box(index, k));
      };
      span(0, data.row.first[r], look.window);
      span(data.row.first[r], data.row.stop[r], look.todo);
      span(data.row.stop[r], total, look.causal);
    }
  }

  paint(data, plane, look, done, now) {
    const tile = data.tile;
    this.upTo(done, (ink) => this.ground(ink, data, plane, look), (ink, i) => {
      const program = tile.program[i], row = data.program.row[program];
      if (data.row.plane[row] !== plane) return;
      const [x, y, w, h] = this.box(data.row.index[row], tile.k[i]);
      ink.fillStyle = look.hue(program);
      ink.fillRect(x, y, w, h);
      if (tile.masked[i] && w > 9) { ink.fillStyle = css(look.paper); ink.globalAlpha = 0.6; ink.beginPath(); ink.moveTo(x + w, y); ink.lineTo(x + w, y + h * 0.45); ink.lineTo(x + w * 0.55, y); ink.fill(); ink.globalAlpha = 1; }
    });
    if (now < 0 || data.planeOf(now) !== plane) return;
    const [x, y, w, h] = this.box(data.row.index[data.program.row[tile.program[now]]], tile.k[now]), ctx = this.ctx, pad = Math.max(0, 4 - w) / 2;
    ctx.fillStyle = NOW; ctx.fillRect(x - pad, y - pad, w + 2 * pad, h + 2 * pad);
    if (w > 12) { ctx.strokeStyle = css(look.ink); ctx.lineWidth = 2; ctx.strokeRect(x, y, w, h); }
  }

  cellAt(x, y) {
    const k = Math.floor(x / this.cw), index = Math.floor(y / this.ch);
    return k >= 0 && index >= 0 && k < this.columns && index < this.rows ? [index, k] : null;
  }
}

class Gantt extends Layered {
  lay(width, lanes) {
    this.lanes = Math.max(1, lanes);
    this.lane = Math.max(Math.min(14, 210 / this.lanes), 1);
    this.size(width, Math.ceil(Math.min(210, this.lane * this.lanes)) + 1);
  }

  x(time, data) { return ((time - data.first) / (data.last - data.first || 1)) * this.width; }
  y(lane) { return this.lane * this.lanes > this.height ? (lane / this.lanes) * this.height : lane * this.lane; }

  bar(ink, data, i) {
    const x = this.x(data.tile.start[i], data), w = this.x(data.tile.end[i], data) - x;
    ink.fillRect(x, this.y(data.program.lane[data.tile.program[i]]), Math.max(w - (w > 4 ? 1 : 0), 0.6), Math.max(this.lane - (this.lane > 4 ? 1 : 0), 1));
  }

  paint(data, look, done, now) {
    this.upTo(done, (ink) => {
      ink.fillStyle = look.todo;
      if (this.faint) { ink.drawImage(this.faint, 0, 0, this.width, this.height); return; }
      for (let i = 0; i < data.count; i++) this.bar(ink, data, i);
      this.faint = document.createElement("canvas");
      this.faint.width = this.layer.width; this.faint.height = this.layer.height;
      this.faint.getContext("2d").drawImage(this.layer, 0, 0);
    }, (ink, i) => { ink.fillStyle = look.hue(data.tile.program[i]); this.bar(ink, data, i); });
    if (now < 0) return;
    const ctx = this.ctx;
    ctx.fillStyle = NOW;
    this.bar(ctx, data, now);
    ctx.strokeStyle = NOW; ctx.lineWidth = 1;
    const x = this.x(data.tile.end[now], data);
    ctx.beginPath(); ctx.moveTo(x, 0); ctx.lineTo(x, this.height); ctx.stroke();
  }

  // The tile under a point; -1: none.
  at(data, x, y) {
    const time = data.first + (x / this.width) * (data.last - data.first);
    const lane = this.lane * this.lanes > this.height ? Math.floor((y / this.height) * this.lanes) : Math.floor(y / this.lane);
    let best = -1;
    for (let i = 0; i < data.count; i++) if (data.tile.start[i] <= time && time < data.tile.end[i]) { if (data.program.lane[data.tile.program[i]] === lane) return i; best = i; }
    return best;
  }
}

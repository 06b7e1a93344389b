// How the map looks: its style sheet, and one KV block with its colours, hatches, fill level and count. Put in front of blockmap.js (see blockmap.py).
const FREE = 0, CACHED = 1, HELD = 2, SHARED = 3;
const NAMES = ["free", "cached, free", "held by one request", "shared"];
const SHORT = ["free", "cached", "held", "shared"];

const STYLE = `
.ctw-map{position:relative;font-size:13px;line-height:1.4;font-family:inherit;color:var(--panel-on-surface-color,inherit)}
.ctw-map canvas.map{display:block;width:100%;touch-action:pan-y;border-radius:6px;cursor:crosshair}
.ctw-map canvas.map:focus-visible{outline:2px solid currentColor;outline-offset:3px}
.ctw-bar{display:flex;flex-wrap:wrap;gap:6px 16px;align-items:center;margin:0 0 8px}
.ctw-key{display:inline-flex;align-items:center;gap:6px;white-space:nowrap}
.ctw-key canvas{width:16px;height:16px;border-radius:3px}
.ctw-key b{font-variant-numeric:tabular-nums;font-weight:600}
.ctw-zoom{margin-left:auto;display:inline-flex;gap:4px}
.ctw-zoom button{font:inherit;color:inherit;background:transparent;border:1px solid color-mix(in srgb,currentColor 35%,transparent);
 border-radius:6px;min-width:30px;height:28px;cursor:pointer;padding:0 8px}
.ctw-zoom button:hover{background:color-mix(in srgb,currentColor 10%,transparent)}
.ctw-zoom button:focus-visible{outline:2px solid currentColor;outline-offset:1px}
.ctw-tip{position:fixed;pointer-events:none;z-index:5;max-width:min(320px,90%);padding:8px 10px;border-radius:8px;font-size:12px;
 line-height:1.45;box-shadow:0 4px 18px rgba(0,0,0,.28);overflow-wrap:anywhere;white-space:pre-wrap}
.ctw-tip[hidden]{display:none}
.ctw-tip b{display:block}
.ctw-sr{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}`;

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
const css = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;

class BlockPainter {
  // ink: the page's text colour, [r, g, b]; it decides light or dark, so that the map needs no setting of its own.
  // palette: [[light, dark], ...] as #rrggbb.
  constructor(ink, palette) {
    this.ink = ink;
    this.dark = ink[0] * 0.3 + ink[1] * 0.59 + ink[2] * 0.11 > 128;
    this.paper = this.dark ? [22, 25, 29] : [255, 255, 255];
    this.palette = palette.length ? palette.map((pair) => rgb(pair[this.dark ? 1 : 0])) : [[0, 114, 178]];
    this.free = mix(this.paper, this.ink, this.dark ? 0.11 : 0.07);
    this.cached = mix(this.paper, this.ink, this.dark ? 0.42 : 0.36);
    this.hatch = this.stripes(css(mix(this.paper, this.ink, 0.5)), -1);
    this.share = this.stripes(this.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.6)", 1);
  }

  stripes(colour, slope) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const ctx = tile.getContext("2d");
    ctx.strokeStyle = colour; ctx.lineWidth = 2;
    for (const shift of [-8, 0, 8]) {
      ctx.beginPath();
      ctx.moveTo(shift, slope > 0 ? 8 : 0); ctx.lineTo(shift + 8, slope > 0 ? 0 : 8);
      ctx.stroke();
    }
    return ctx.createPattern(tile, "repeat");
  }

  colourOf(code) {
    const kind = code & 255;
    return kind === FREE ? this.free : kind === CACHED ? this.cached : this.palette[((code >> 8) & 255) % this.palette.length];
  }

  // The colour of a block that is too small for a pattern, as the four bytes of a canvas pixel.
  pixel(code, faded) {
    let c = this.colourOf(code);
    if ((code & 255) === SHARED) c = mix(c, this.ink, 0.45);
    if (faded) c = mix(c, this.paper, 0.7);
    return (0xff000000 | (c[2] << 16) | (c[1] << 8) | c[0]) >>> 0;
  }

  cell(ctx, x, y, c, code, withCount) {
    const kind = code & 255, gap = c >= 12 ? 2 : 1, w = c - gap, left = x + gap / 2, top = y + gap / 2;
    const shape = (px, py, pw, ph) => { ctx.beginPath(); if (c >= 12) ctx.roundRect(px, py, pw, ph, Math.min(4, c / 7)); else ctx.rect(px, py, pw, ph); };
    shape(left, top, w, w);
    if (kind === FREE) { ctx.fillStyle = css(this.free); ctx.fill(); return; }
    if (kind === CACHED) {
      ctx.fillStyle = css(mix(this.paper, this.ink, 0.16)); ctx.fill();
      ctx.fillStyle = this.hatch; ctx.fill();
      return;
    }
    const colour = this.colourOf(code), fill = (code >>> 24) / 255;
    if (fill < 1) {
      ctx.fillStyle = css(mix(this.paper, colour, 0.28)); ctx.fill();
      const h = w * fill;
      ctx.save(); ctx.clip(); ctx.fillStyle = css(colour); ctx.fillRect(left, top + w - h, w, h); ctx.restore();
      ctx.strokeStyle = css(colour); ctx.lineWidth = 1; shape(left + 0.5, top + 0.5, w - 1, w - 1); ctx.stroke();
      shape(left, top, w, w);
    } else { ctx.fillStyle = css(colour); ctx.fill(); }
    if (kind !== SHARED) return;
    ctx.fillStyle = this.share; ctx.fill();
    if (!withCount) return;
    const count = String((code >> 16) & 255);
    ctx.font = `700 ${Math.min(13, c * 0.55)}px system-ui, sans-serif`; ctx.textAlign = "center"; ctx.textBaseline = "middle";
    ctx.lineWidth = 3; ctx.lineJoin = "round"; ctx.strokeStyle = css(this.paper); ctx.fillStyle = css(this.ink);
    ctx.strokeText(count, x + c / 2, y + c / 2 + 0.5); ctx.fillText(count, x + c / 2, y + c / 2 + 0.5);
  }
}


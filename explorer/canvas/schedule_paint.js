// How the schedule looks: its style sheet, and the fill of each phase. Every phase has a pattern of its own besides its colour.
const PHASES = ["prefill", "decode", "padding", "preempted", "swapped", "stalled"];
const PREFILL = 0, DECODE = 1, PADDING = 2, STALLED = 5;
const STYLE = `
.ct-sched { position: relative; font: 13px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); }
.ct-sched .bar { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; margin: 0 0 8px; font-size: 12.5px; }
.ct-sched .key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; } .ct-sched .key canvas { width: 22px; height: 13px; border-radius: 3px; }
.ct-sched .tools { margin-left: auto; display: inline-flex; gap: 4px; align-items: center; }
.ct-sched button { font: inherit; color: inherit; background: transparent; border: 1px solid color-mix(in srgb, currentColor 35%, transparent); border-radius: 6px; min-width: 30px; height: 28px; padding: 0 9px; cursor: pointer; }
.ct-sched button:hover { background: color-mix(in srgb, currentColor 9%, transparent); } .ct-sched button[aria-pressed=true] { background: color-mix(in srgb, var(--panel-primary-color) 20%, transparent); border-color: var(--panel-primary-color); }
.ct-sched button:focus-visible, .ct-sched canvas.map:focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 2px; }
.ct-sched canvas.map { display: block; width: 100%; touch-action: pan-y; cursor: crosshair; border-radius: 4px; }
.ct-sched .none { border: 1px dashed color-mix(in srgb, currentColor 14%, transparent); border-radius: 10px; padding: 22px 18px; text-align: center; line-height: 1.5; color: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-sched .tip { position: fixed; z-index: 20; pointer-events: none; max-width: min(300px, 90vw); padding: 8px 11px; border-radius: 9px; font-size: 12.5px; line-height: 1.5; white-space: pre-line; overflow-wrap: anywhere;
  background: var(--panel-surface-color); border: 1px solid color-mix(in srgb, currentColor 18%, transparent); box-shadow: 0 4px 18px rgb(0 0 0 / .25); }
.ct-sched .tip[hidden], .ct-sched [hidden] { display: none; } .ct-sched .sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
@media (max-width: 600px) { .ct-sched .tools { margin-left: 0; } }
`;

class Paint {
  constructor(root, colours) {
    const ink = (getComputedStyle(root).color.match(/[\d.]+/g) || [30, 30, 30]).slice(0, 3).map(Number);
    this.dark = ink[0] * 0.3 + ink[1] * 0.59 + ink[2] * 0.11 > 128;
    this.ink = `rgb(${ink.join(",")})`;
    this.faint = (share) => `rgba(${ink.join(",")},${share})`;
    this.paper = this.dark ? "#16191d" : "#ffffff";
    this.base = PHASES.map((phase) => colours[phase][this.dark ? 1 : 0]);
    this.fills = PHASES.map((phase, i) => this.pattern(phase, this.base[i]));
    this.onFill = ["#000000", this.dark ? "#000000" : "#ffffff"];  // letters on prefill, on decode
  }

  pattern(phase, colour) {
    if (phase === "decode") return colour;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const ctx = tile.getContext("2d");
    const line = (...points) => {
      ctx.beginPath();
      points.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
      ctx.stroke();
    };
    ctx.fillStyle = ctx.strokeStyle = colour;
    ctx.lineWidth = 1.6;
    if (phase === "prefill") {  // full, with slanting lines
      ctx.fillRect(0, 0, 8, 8);
      ctx.strokeStyle = "rgba(0,0,0,.33)";
      for (const shift of [-8, 0, 8]) line([shift, 8], [shift + 8, 0]);
    } else if (phase === "padding") {  // a grid of dots on little
      ctx.globalAlpha = 0.3;
      ctx.fillRect(0, 0, 8, 8);
      ctx.globalAlpha = 1;
      ctx.fillRect(1, 1, 2.4, 2.4);
      ctx.fillRect(5, 5, 2.4, 2.4);
    } else if (phase === "preempted") {  // crosses
      ctx.globalAlpha = 0.16;
      ctx.fillRect(0, 0, 8, 8);
      ctx.globalAlpha = 1;
      line([1, 1], [7, 7]);
      line([7, 1], [1, 7]);
    } else if (phase === "swapped") {  // level lines
      ctx.globalAlpha = 0.16;
      ctx.fillRect(0, 0, 8, 8);
      ctx.globalAlpha = 1;
      line([0, 2], [8, 2]);
      line([0, 6], [8, 6]);
    }
    return phase === "stalled" ? colour : ctx.createPattern(tile, "repeat");
  }

  // One bar, or the part [from, to) of its height.
  bar(ctx, phase, x, y, width, height) {
    ctx.fillStyle = this.fills[phase];
    if (phase === STALLED) {
      for (let dash = x; dash < x + width; dash += 7) ctx.fillRect(dash, y + height / 2 - 1, Math.min(4, x + width - dash), 2);
      return;
    }
    ctx.fillRect(x, y, width, height);
  }
}

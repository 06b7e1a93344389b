// How the player of tiles looks. Put in front of tiles.js (see tiles.py).
const CSS = `
.ct-tiles { font: 14px var(--bokeh-base-font, sans-serif); color: var(--panel-on-surface-color); position: relative;
  --line: color-mix(in srgb, currentColor 14%, transparent); --soft: color-mix(in srgb, currentColor 7%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-tiles .empty { border: 1px dashed var(--line); border-radius: 10px; padding: 22px 18px; text-align: center; color: var(--muted); line-height: 1.5; }
.ct-tiles .bar { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; margin-bottom: 10px; }
.ct-tiles button, .ct-tiles select { font: inherit; font-size: 13px; color: inherit; background: var(--panel-surface-color); border: 1px solid var(--line); border-radius: 8px; min-width: 34px; height: 30px; padding: 0 8px; cursor: pointer; }
.ct-tiles button:hover { border-color: currentColor; } .ct-tiles input[type=range] { flex: 1 1 130px; min-width: 80px; accent-color: var(--panel-primary-color); }
.ct-tiles output { font-size: 12px; color: var(--muted); font-variant-numeric: tabular-nums; white-space: nowrap; } .ct-tiles :focus-visible { outline: 2px solid var(--panel-primary-color); outline-offset: 2px; }
.ct-tiles .two { display: grid; grid-template-columns: minmax(0, 1fr); gap: 14px 26px; } .ct-tiles.wide .two { grid-template-columns: minmax(0, 11fr) minmax(0, 10fr); }
.ct-tiles canvas { display: block; max-width: 100%; border-radius: 3px; } .ct-tiles canvas.grid, .ct-tiles canvas.gantt { cursor: pointer; touch-action: pan-y; }
.ct-tiles h3 { font-size: 13px; font-weight: 620; margin: 0 0 5px; } .ct-tiles .what { font-size: 12px; color: var(--muted); margin: 5px 0 4px; line-height: 1.45; }
.ct-tiles .chip { display: inline-block; font-size: 11px; font-weight: 500; border: 1px solid var(--line); border-radius: 99px; padding: 2px 8px; margin-left: 6px; white-space: nowrap; }
.ct-tiles .keys { display: flex; flex-wrap: wrap; gap: 3px 14px; font-size: 12px; margin-top: 8px; color: var(--muted); } .ct-tiles .keys canvas { display: inline-block; width: 14px; height: 14px; vertical-align: -3px; margin-right: 5px; }
.ct-tiles dl { display: grid; grid-template-columns: repeat(2, minmax(0, auto)); gap: 2px 14px; font-size: 12.5px; margin: 0; } .ct-tiles dt { color: var(--muted); } .ct-tiles dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ct-tiles .facts { border: 1px solid var(--line); border-radius: 9px; padding: 9px 11px; margin-bottom: 12px; }
.ct-tiles .mem { margin-bottom: 11px; } .ct-tiles .mem .head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 10px; font-size: 12.5px; margin-bottom: 3px; } .ct-tiles .mem .head span { color: var(--muted); font-variant-numeric: tabular-nums; }
.ct-tiles .track { display: flex; height: 34px; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; background: var(--soft); }
.ct-tiles .part { box-sizing: border-box; flex: 0 0 auto; min-width: 0; overflow: hidden; border-right: 1px solid var(--panel-surface-color); font-size: 11px; line-height: 1.25; padding: 3px 3px; white-space: nowrap; background: color-mix(in srgb, #56b4e9 45%, var(--panel-surface-color)); }
.ct-tiles .part b { display: block; font-weight: 600; } .ct-tiles .part.k { background: color-mix(in srgb, #0072b2 38%, var(--panel-surface-color)); } .ct-tiles .part.v { background: color-mix(in srgb, #009e73 38%, var(--panel-surface-color)); }
.ct-tiles .part.acc { background: color-mix(in srgb, #e69f00 45%, var(--panel-surface-color)); } .ct-tiles .part.sp { background: color-mix(in srgb, #cc79a7 45%, var(--panel-surface-color)); } .ct-tiles .part.ml { background: color-mix(in srgb, #d55e00 60%, var(--panel-surface-color)); }
.ct-tiles .part.other { background: repeating-linear-gradient(45deg, var(--line) 0 3px, transparent 3px 6px); }
.ct-tiles .part.loading { background-image: repeating-linear-gradient(135deg, color-mix(in srgb, var(--panel-surface-color) 60%, transparent) 0 3px, transparent 3px 7px); } .ct-tiles .part.idle { opacity: .45; } .ct-tiles .part.use { box-shadow: inset 0 0 0 2px #d55e00; }
.ct-tiles .list.stages { color: var(--panel-on-surface-color); font-variant-numeric: tabular-nums; min-height: 1.4em; } .ct-tiles .list { font-size: 11.5px; color: var(--muted); margin-top: 3px; line-height: 1.4; }
.ct-tiles table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; } .ct-tiles td, .ct-tiles th { text-align: right; padding: 2px 0 2px 14px; font-weight: 400; } .ct-tiles th { color: var(--muted); } .ct-tiles td:first-child { text-align: left; padding-left: 0; color: var(--muted); }
.ct-tiles .said { font-size: 12.5px; margin-top: 6px; line-height: 1.45; } .ct-tiles .said.good::before { content: "✓ "; color: #009e73; font-weight: 700; }
.ct-tiles .tip { position: absolute; z-index: 20; pointer-events: none; display: none; max-width: 260px; padding: 6px 10px; border-radius: 8px; font-size: 12px; line-height: 1.45; background: var(--panel-surface-color); border: 1px solid var(--line); box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
`;

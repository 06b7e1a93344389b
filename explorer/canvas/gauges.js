// Tiles with one number each and its last steps as a line. One ESM file for Panel and for anywidget.
// Python -> here: param gauges = [{key, label, hint, badge, sign, colour}]; messages {reset: bool, points: {key: [[step, value, text], ...]}}.

const KEEP = 160; // points a line shows
const CSS = `
.ct-gauges { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 116px), 1fr)); gap: 10px; font: 14px var(--bokeh-base-font, sans-serif);
  color: var(--panel-on-surface-color); --line: color-mix(in srgb, currentColor 14%, transparent); --muted: color-mix(in srgb, var(--panel-on-surface-color) 70%, var(--panel-surface-color)); }
.ct-gauges section { border: 1px solid var(--line); border-radius: 12px; padding: 9px 11px 8px; min-width: 0; position: relative; background: var(--panel-surface-color); display: flex; flex-direction: column; }
.ct-gauges h3 { font-size: 12.5px; font-weight: 500; color: var(--muted); margin: 0; display: flex; justify-content: space-between; align-items: flex-start; gap: 6px; line-height: 1.3; flex: 1 0 auto; cursor: help; }
.ct-gauges h3 .label { min-width: 0; overflow-wrap: anywhere; } /* a long one takes two lines; the values of a row stay level */
.ct-gauges h3 .sign { cursor: help; font-size: 12px; flex: none; }
.ct-gauges .value { font-size: 20px; font-weight: 600; letter-spacing: -.01em; line-height: 1.45; font-variant-numeric: tabular-nums; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.ct-gauges .value small { font-size: 12.5px; font-weight: 450; color: var(--muted); letter-spacing: 0; }
.ct-gauges svg { display: block; width: 100%; height: 34px; overflow: visible; touch-action: pan-y; }
.ct-gauges .area { fill: var(--panel-primary-color); opacity: .12; } .ct-gauges .trace { fill: none; stroke: var(--panel-primary-color); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.ct-gauges .mark { stroke: currentColor; stroke-width: 1; opacity: .6; vector-effect: non-scaling-stroke; }
.ct-gauges .read { position: absolute; right: 8px; bottom: 44px; font-size: 11.5px; padding: 2px 7px; border-radius: 6px; background: var(--panel-surface-color); border: 1px solid var(--line); pointer-events: none; white-space: nowrap; }
`;
const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, className) => {
  const made = document.createElementNS(SVG, tag);
  made.setAttribute("class", className);
  return made;
};

function tile(gauge) {
  const section = document.createElement("section");
  const title = document.createElement("h3");
  const label = document.createElement("span");
  label.className = "label";
  label.textContent = gauge.label;
  title.append(label);
  title.title = gauge.hint;
  const sign = document.createElement("span");
  sign.className = "sign";
  sign.textContent = gauge.sign;
  sign.title = gauge.badge;
  sign.setAttribute("aria-label", gauge.badge);
  sign.style.color = gauge.colour;
  title.append(sign);
  const value = document.createElement("div");
  value.className = "value";
  const number = document.createTextNode("–");
  const unit = document.createElement("small");
  value.append(number, " ", unit);
  const read = document.createElement("div");
  read.className = "read";
  read.hidden = true;
  const chart = svg("svg", "");
  chart.setAttribute("viewBox", "0 0 100 34");
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("role", "img");
  const area = svg("path", "area");
  const trace = svg("path", "trace");
  const mark = svg("line", "mark");
  mark.setAttribute("y1", "0");
  mark.setAttribute("y2", "34");
  mark.style.display = "none";
  chart.append(area, trace, mark);
  section.append(title, value, chart, read);

  const points = []; // [step, value, text]
  let pointed = null; // where the pointer is, 0..1
  const x = (i) => (points.length < 2 ? 100 : (100 * i) / (points.length - 1));
  function draw() {
    const last = points[points.length - 1];
    const [amount, ...rest] = (last ? last[2] : "–").split(" ");
    number.data = amount;
    unit.textContent = rest.join(" ");
    const top = gauge.top ?? Math.max(1e-9, ...points.map((p) => p[1]));
    const y = (v) => 33 - 31 * Math.min(1, Math.max(0, v / top));
    const path = points.map((p, i) => `${i ? "L" : "M"}${x(i).toFixed(2)} ${y(p[1]).toFixed(2)}`).join("");
    trace.setAttribute("d", path);
    area.setAttribute("d", path ? `${path}L100 34L${x(0).toFixed(2)} 34Z` : "");
    chart.setAttribute("aria-label", `${gauge.label}: ${last ? last[2] : "–"}`);
    const at = pointed === null || !points.length ? null : Math.round(pointed * (points.length - 1));
    mark.style.display = at === null ? "none" : "";
    read.hidden = at === null;
    if (at === null) return;
    mark.setAttribute("x1", x(at));
    mark.setAttribute("x2", x(at));
    read.textContent = `${gauge.step_label} ${points[at][0]}: ${points[at][2]}`;
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    pointed = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    draw();
  });
  chart.addEventListener("pointerleave", () => { pointed = null; draw(); });
  draw();
  return {
    section,
    add(more, reset) {
      if (reset) points.length = 0;
      points.push(...more);
      points.splice(0, points.length - KEEP);
      draw();
    },
  };
}

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "ct-gauges";
  const style = document.createElement("style");
  style.textContent = CSS;
  const tiles = new Map();
  for (const gauge of model.get("gauges")) {
    const made = tile(gauge);
    tiles.set(gauge.key, made);
    root.append(made.section);
  }
  el.append(style, root);
  const onMessage = (message) => {
    for (const [key, made] of tiles) {
      const more = message.points?.[key] ?? [];
      if (more.length || message.reset) made.add(more, Boolean(message.reset));
    }
  };
  model.on("msg:custom", onMessage);
  model.set("action", { seq: (model.get("action")?.seq ?? 0) + 1, kind: "ready" }); // counts on: else a second drawing would look like no change
  model.save_changes();
  return () => model.off("msg:custom", onMessage);
}

export default { render };

// Plays a recorded run: gives every track its value at the step that is shown. See explorer/export/tracks.py and html.py.
const byId = (id) => document.getElementById(id);

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("packed").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function moduleOf(text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return await import(url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

// The value of a track ([frame, value, frame, value, ...]) at a frame.
function valueAt(points, frame) {
  let low = 0, high = points.length / 2;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[2 * middle] <= frame) low = middle;
    else high = middle;
  }
  return points[2 * low + 1];
}

function operations([id, name, ...rest], value) {
  if (name === "state") return [[id, "state", { [rest[0]]: value }]];
  if (name === "message") return value.map((message) => [id, "message", message]);
  if (name === "patch") return [[id, "patch", [{ kind: "ModelChanged", model: { id: rest[0] }, attr: rest[1], new: value }]]];
  if (name === "columns") return [[id, "patch", [{ kind: "ColumnDataChanged", model: { id: rest[0] }, attr: "data", data: value, cols: null }]]];
  return [[id, name, value]];
}

// One page of the run, drawn when it is first looked at.
class Shown {
  constructor(page, runtime, bokeh) {
    Object.assign(this, { page, runtime, bokeh });
    this.el = document.createElement("section");
    this.el.hidden = true;
    byId("view").append(this.el);
    this.drawn = null;
    this.at = []; // which value each track has now
  }

  show(frame) {
    if (!this.drawn) {
      const title = document.createElement("h2"), question = document.createElement("p"), place = document.createElement("div");
      title.textContent = this.page.title;
      question.textContent = this.page.question;
      question.className = "muted";
      this.el.append(title, question, place);
      this.drawn = this.runtime.mount(place, JSON.parse(this.page.spec), { bokeh: this.bokeh });
      this.drawn.apply(JSON.parse(this.page.opening));
    }
    const ops = [];
    this.page.tracks.forEach(([op, points], i) => {
      const value = valueAt(points, frame);
      if (this.at[i] === value) return;
      this.at[i] = value;
      ops.push(...operations(op, JSON.parse(this.page.values[value])));
    });
    this.drawn.apply(ops);
  }
}

// What the transport bar sees: anywidget's interface over plain values.
class Bar {
  constructor(values, acted) {
    this.values = values;
    this.listeners = {};
    this.acted = acted;
  }
  get(name) { return this.values[name]; }
  set(name, value) {
    if (name === "action") this.acted(value);
    else if (this.values[name] !== value) {
      this.values[name] = value;
      for (const listener of this.listeners[`change:${name}`] ?? []) listener();
    }
  }
  save_changes() {}
  on(name, listener) { (this.listeners[name] ??= []).push(listener); }
  off() {}
}

class Player {
  constructor({ data, sources }, runtime, transport) {
    const { steps } = data;
    this.steps = steps;
    this.pages = data.pages.map((page) => new Shown(page, runtime, sources.bokeh));
    this.frame = 0;
    this.bar = new Bar(
      { first: steps[0], last: data.last, step: steps[0], live: false, playing: false, speed: 5, texts: data.texts },
      (action) => this.act(action),
    );
    transport.render({ model: this.bar, el: byId("bar") });
    this.buttons = data.pages.map(({ slug, title }, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = title;
      button.addEventListener("click", () => { this.open(i); this.tell(slug); });
      return button;
    });
    byId("pages").append(...(this.buttons.length > 1 ? this.buttons : []));
    const asked = new URLSearchParams(location.hash.slice(1));
    const wanted = data.pages.findIndex(({ slug }) => slug === asked.get("page"));
    const step = Number(asked.get("step"));
    if (asked.has("step") && Number.isFinite(step)) this.frame = this.frameOf(step);
    this.open(Math.max(0, wanted));
  }

  open(i) {
    this.page = i;
    this.pages.forEach((page, j) => { page.el.hidden = i !== j; });
    this.buttons.forEach((button, j) => (i === j ? button.setAttribute("aria-current", "page") : button.removeAttribute("aria-current")));
    this.go(this.frame);
  }

  frameOf(step) { // the last kept step up to this one
    let frame = 0;
    while (frame + 1 < this.steps.length && this.steps[frame + 1] <= step) frame += 1;
    return frame;
  }

  go(frame) {
    this.frame = Math.max(0, Math.min(frame, this.steps.length - 1));
    this.pages[this.page].show(this.frame);
    this.bar.set("step", this.steps[this.frame]);
    if (!this.timer) this.tell(this.pages[this.page].page.slug);
  }

  tell(slug) { // where this is, for a reload or a link
    try { history.replaceState(null, "", `#page=${slug}&step=${this.steps[this.frame]}`); } catch { /* some viewers forbid it */ }
  }

  act({ kind, value }) {
    if (kind === "play" && this.frame < this.steps.length - 1) this.play();
    else if (kind === "speed") { this.bar.set("speed", value); if (this.timer) this.play(); }
    else {
      this.pause();
      if (kind === "back") this.go(this.frame - 1);
      else if (kind === "step") this.go(this.frame + 1);
      else if (kind === "goto") this.go(this.frameOf(value));
      else if (kind === "follow") this.go(this.steps.length - 1);
    }
  }

  // Steps a second of the run, also where only some of the steps are here; at most as fast as it can be drawn.
  play() {
    this.pause();
    this.bar.set("playing", true);
    const from = { time: performance.now(), step: this.steps[this.frame] };
    const tick = () => {
      const step = from.step + ((performance.now() - from.time) / 1000) * this.bar.get("speed");
      const frame = this.frameOf(step);
      if (frame !== this.frame) this.go(frame);
      if (this.frame >= this.steps.length - 1) this.pause();
      else this.timer = setTimeout(tick, 33);
    };
    this.timer = setTimeout(tick, 33);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.bar.set("playing", false);
  }
}

try {
  const all = await unpacked();
  const [runtime, transport] = await Promise.all([moduleOf(all.sources.runtime), moduleOf(all.sources.transport)]);
  globalThis.cutawayPlayer = new Player(all, runtime, transport.default);
} catch (error) {
  const told = document.createElement("p");
  told.className = "failed";
  told.setAttribute("role", "alert");
  told.textContent = `${error?.stack ?? error}`;
  byId("view").append(told);
  throw error;
}

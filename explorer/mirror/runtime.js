// Draws a spec and applies operations; see explorer/mirror/__init__.py for both. Knows neither Panel nor notebooks.
const BASE_CSS = `
:host { display: block; box-sizing: border-box; min-width: 0; }
:host([hidden]) { display: none !important; }
`;
const BOX_CSS = `
:host { display: flex; flex-direction: column; }
:host(.ctm-row) { flex-direction: row; flex-wrap: nowrap; }
slot { display: contents; }
::slotted(.ctm-wide) { align-self: stretch; }
:host(:not(.ctm-row)) ::slotted(:not(.ctm-wide)) { align-self: flex-start; }
:host(.ctm-row) ::slotted(.ctm-wide) { flex: 1 1 0; align-self: auto; }
`;
const ROOT_CSS = `
.ctm-root { color: var(--panel-on-surface-color); font: 14px/1.4 var(--bokeh-base-font, system-ui, sans-serif); text-align: left; position: relative; }
.ctm-error { margin: 8px 0 0; padding: 8px 12px; border-left: 3px solid #d55e00; border-radius: 6px; font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace;
  color: var(--panel-on-surface-color); background: color-mix(in srgb, #d55e00 12%, var(--panel-surface-color)); white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14em; overflow: auto; }
`;
const PAGE = "*";

// Bytes as the canvases take them, from buffers beside the JSON, from base64 inside it, or as they are.
function unpack(value, buffers = []) {
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  if (value instanceof ArrayBuffer) return new DataView(value);
  if (Array.isArray(value)) return value.map((each) => unpack(each, buffers));
  if ("$buffer" in value) return asView(buffers[value.$buffer]);
  if ("$base64" in value) return new DataView(Uint8Array.from(atob(value.$base64), (c) => c.charCodeAt(0)).buffer);
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, unpack(each, buffers)]));
}
const asView = (data) => (data instanceof ArrayBuffer ? new DataView(data) : new DataView(data.buffer, data.byteOffset, data.byteLength));

async function importText(text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return await import(url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

// BokehJS as a value of our own: nothing global is set, so a notebook's own BokehJS stays what it is. Loaded once a page.
const SHARED = (globalThis[Symbol.for("cutaway.mirror")] ??= { bokeh: null });
function loadBokeh(source) {
  SHARED.bokeh ??= Promise.resolve(typeof source === "function" ? source() : source).then(async (text) => {
    if (!text) throw new Error("BokehJS was not handed over");
    return (await importText(`const root = {};\n(function () {\n${text}\n}).call(root);\nexport default root.Bokeh;`)).default;
  });
  SHARED.bokeh.catch(() => { SHARED.bokeh = null; });
  return SHARED.bokeh;
}

function showError(el, error) {
  const text = `${error?.stack?.includes(error?.message) ? error.stack : `${error?.message ?? error}\n${error?.stack ?? ""}`}`.trim();
  const made = make("pre", "ctm-error", text);
  made.setAttribute("role", "alert");
  el.append(made);
}

const same = (a, b) => a === b || (typeof a === "object" && typeof b === "object" && !ArrayBuffer.isView(a) && !ArrayBuffer.isView(b) && JSON.stringify(a) === JSON.stringify(b));

// The model that a canvas script sees: anywidget's interface.
class Model {
  constructor(state, save) {
    this.state = { ...state };
    this.listeners = new Map();
    this.changed = {};
    this.save = save;
    for (const name of ["get", "set", "on", "off", "save_changes", "send"]) this[name] = this[name].bind(this);
  }
  get(name) { return this.state[name]; }
  set(name, value) {
    this.changed[name] = value;
    this.take({ [name]: value });
  }
  save_changes() {
    const changed = this.changed;
    this.changed = {};
    if (Object.keys(changed).length) this.save(changed);
  }
  send() { throw new Error("canvases answer through their parameters"); }
  on(name, callback) { (this.listeners.get(name) ?? this.listeners.set(name, new Set()).get(name)).add(callback); }
  off(name, callback) {
    if (name == null) this.listeners.clear();
    else if (callback) this.listeners.get(name)?.delete(callback);
    else this.listeners.delete(name);
  }
  fire(name, ...values) { for (const callback of [...(this.listeners.get(name) ?? [])]) callback(...values); }
  take(values) {
    const names = Object.keys(values).filter((name) => !same(this.state[name], values[name]));
    Object.assign(this.state, values);
    for (const name of names) this.fire(`change:${name}`);
  }
}

class Node {
  constructor(page, id, facts) {
    this.page = page; this.id = id; this.kind = facts.kind; this.p = facts;
    this.host = make("div");
    this.host.dataset.node = id;
    this.host.dataset.kind = facts.kind;
    this.shadow = this.host.attachShadow({ mode: "open" });
    this.extra = { box: BOX_CSS, row: BOX_CSS }[facts.kind] ?? (CONTROLS[facts.kind] ? CONTROL_CSS : "");
    this.draw = () => {};
    this.closed = false;
    this.look();
    const begin = { canvas: "beginCanvas", figure: "beginFigure", html: "beginText", pre: "beginText", box: "beginBox", row: "beginBox", tabs: "beginTabs" }[facts.kind];
    if (begin) this[begin]();
    else this.beginControl();
    this.draw();
  }

  act(name, value) { this.page.send([this.id, name, value]); }

  look() {
    const { p, host } = this;
    host.className = [...p.classes, p.kind === "row" ? "ctm-row" : ""].join(" ").trim();
    host.hidden = !p.visible;
    host.style.cssText = "";
    for (const [name, value] of Object.entries(p.style)) host.style.setProperty(name, value);
    this.shadow.adoptedStyleSheets = [this.page.sheet(BASE_CSS + this.extra), ...p.css.map((key) => this.page.sheetOf(key))];
  }

  set(name, value) {
    this.p[name] = value;
    if (["visible", "classes", "style", "css"].includes(name)) this.look();
    this.draw();
  }

  beginBox() {
    const slot = make("slot");
    this.shadow.append(slot);
    this.draw = () => {
      const wanted = this.p.children.map((id) => this.page.node(id));
      for (const child of [...this.host.children]) if (!wanted.some((node) => node.host === child)) this.page.drop(child.dataset.node);
      wanted.forEach((node, i) => {
        const there = this.host.children[i];
        if (there !== node.host) this.host.insertBefore(node.host, there ?? null);
      });
    };
  }

  beginTabs() {
    const bar = make("div", "group"), slot = make("slot");
    bar.setAttribute("role", "tablist");
    this.extra = CONTROL_CSS;
    this.look();
    this.shadow.append(bar, slot);
    this.draw = () => {
      const { titles, value, children } = this.p;
      bar.replaceChildren(...titles.map((title, i) => {
        const made = make("button", "", title);
        made.type = "button";
        made.setAttribute("role", "tab");
        made.setAttribute("aria-checked", String(i === value));
        made.addEventListener("click", () => this.act("value", i));
        return made;
      }));
      children.forEach((id, i) => {
        const { host } = this.page.node(id);
        if (host.parentNode !== this.host) this.host.append(host);
        host.style.display = i === value ? "" : "none";
      });
    };
  }

  beginText() {
    const body = make(this.kind === "pre" ? "pre" : "div");
    this.shadow.append(body);
    let drawn = null;
    this.draw = () => {
      const text = this.kind === "pre" ? this.p.text : this.p.html;
      if (text === drawn) return;
      drawn = text;
      if (this.kind === "pre") body.textContent = text;
      else body.innerHTML = text; // markup of our own pages: what people or models wrote was escaped there
    };
  }

  beginControl() {
    const root = make("div");
    this.shadow.append(root);
    this.draw = CONTROLS[this.kind](root, this.p, (name, value) => this.act(name, value));
    const draw = this.draw;
    this.draw = () => {
      const { disabled } = this.p;
      this.p.disabled = disabled || this.page.still;
      draw();
      this.p.disabled = disabled;
    };
  }

  beginCanvas() {
    const el = make("div");
    this.shadow.append(el);
    this.model = new Model(this.p.state, (changed) => this.act("state", changed));
    this.waiting = []; // what came before the script was there: it has to see every step, as deltas build on each other
    this.page.doing(async () => {
      const script = (await this.page.module(this.p.module)).default;
      const { render } = typeof script === "function" ? await script() : script;
      if (this.closed) return;
      this.cleanup = await render({ model: this.model, el });
      const { waiting } = this;
      this.waiting = null;
      for (const [name, value] of waiting) this.canvas(name, value);
    });
  }

  canvas(name, value) {
    if (this.waiting) this.waiting.push([name, value]);
    else if (name === "state") this.model.take(value);
    else this.model.fire("msg:custom", value, []);
  }

  beginFigure() {
    const el = make("div");
    this.shadow.append(el);
    this.patches = [];
    this.page.doing(async () => {
      const bokeh = await loadBokeh(this.page.bokeh);
      if (this.closed) return;
      const doc = (this.doc = bokeh.Document?.from_json?.(this.p.document) ?? bokeh.require("document").Document.from_json(this.p.document));
      delete this.p.document;
      for (const events of this.patches.splice(0)) doc.apply_json_patch({ events });
      paintFigure(doc, this.page.dark);
      await shown(this.host, () => this.closed);
      if (this.closed) return;
      this.views = await bokeh.embed.add_document_standalone(doc, el);
      doc.on_change((event) => this.figureChanged(event));
    });
  }

  figureChanged(event) {
    const told = event.kind === "MessageSent" || (event.kind === "ModelChanged" && event.sync !== false && ["start", "end", "indices"].includes(event.attr));
    if (told && !this.patching) this.act("events", this.doc.create_json_patch([event]).events);
  }

  patch(events) {
    if (!this.doc) return void this.patches.push(events);
    this.patching = true;
    try {
      this.doc.apply_json_patch({ events });
    } finally {
      this.patching = false;
    }
  }

  close() {
    this.closed = true;
    this.page.doing(async () => { if (typeof this.cleanup === "function") await this.cleanup(); });
    this.doc?.clear?.();
    this.host.remove();
  }
}

// When there is room for it: a figure that is drawn into nothing keeps the wrong size.
const shown = (host, given_up) => new Promise((resolve) => {
  const observer = new ResizeObserver(() => {
    if (!given_up() && !host.clientWidth) return;
    observer.disconnect();
    resolve();
  });
  observer.observe(host);
});

class Page {
  constructor(el, spec, { bokeh = null, send = null } = {}) {
    this.bokeh = bokeh;
    this.still = send === null; // nobody answers
    this.tell = send ?? (() => {});
    this.facts = unpack(spec);
    this.nodes = new Map();
    this.made = new Map(); // stylesheets by text
    this.scripts = new Map();
    this.body = make("div", "ctm-root");
    this.errors = make("div");
    const style = make("style", "", ROOT_CSS);
    el.append(style, this.body, this.errors);
    this.parts = [style, this.body, this.errors];
    this.unfollow = followTheme((dark) => {
      this.dark = dark;
      for (const part of [this.body, this.errors]) paintRoot(part, dark);
      for (const node of this.nodes.values()) if (node.doc) paintFigure(node.doc, dark);
    });
    this.doing(() => this.body.append(this.node(this.facts.root).host));
  }

  // Runs something; what goes wrong is shown below the view and does not stop the rest.
  doing(what) {
    const failed = (error) => { showError(this.errors, error); console.warn(error); };
    try {
      Promise.resolve(what()).catch(failed);
    } catch (error) {
      failed(error);
    }
  }

  send(action) { this.tell(action); }

  node(id) {
    if (!this.nodes.has(id)) this.nodes.set(id, new Node(this, id, this.facts.nodes[id]));
    return this.nodes.get(id);
  }

  drop(id) {
    const node = this.nodes.get(id);
    if (!node) return;
    for (const child of node.p.children ?? []) this.drop(child);
    node.close();
    this.nodes.delete(id);
  }

  sheetOf(key) { return this.sheet(this.facts.sheets[key]); }
  sheet(text) {
    if (!this.made.has(text)) {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(text);
      this.made.set(text, sheet);
    }
    return this.made.get(text);
  }

  module(key) {
    if (!this.scripts.has(key)) this.scripts.set(key, importText(this.facts.modules[key]));
    return this.scripts.get(key);
  }

  one([id, name, value]) {
    if (id === PAGE) {
      if (name === "texts") for (const where of ["sheets", "modules"]) Object.assign(this.facts[where], value[where]);
      else if (name === "nodes") Object.assign(this.facts.nodes, value);
      return;
    }
    const node = this.nodes.get(id);
    if (!node) return;
    if (name === "state" || name === "message") node.canvas(name, value);
    else if (name === "patch") node.patch(value);
    else node.set(name, value);
  }

  destroy() {
    this.unfollow();
    this.drop(this.facts.root);
    for (const part of this.parts) part.remove();
  }
}

// Draw a spec into el. me: who acts here; operations that follow from its own canvas changes are not applied to it again.
function mount(el, spec, options = {}) {
  const page = new Page(el, spec, options);
  return {
    page,
    apply(operations, buffers = []) {
      for (const op of unpack(operations, buffers)) if (op[3] === undefined || op[3] !== options.me) page.doing(() => page.one(op));
    },
    fail(error) { showError(page.errors, error); },
    destroy: () => page.destroy(),
  };
}

export { mount, unpack, isDark, showError };

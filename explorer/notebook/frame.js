
// ---- The widget's half in the page (after the runtime, in one module): spec and operations in, actions out.
// Operations that come before a view is drawn are kept, so that a cell's view is complete even while the kernel is busy.
const FRAMES = (SHARED.frames ??= new Map()); // widget -> {version, kept: [[operations, buffers], ...], or null: too late}
const KEPT = 300;
const EVERY_MS = 30; // between two values of one control
const SEEN_MS = 5000;
// Notebook 7 looks for its shortcuts before what has the focus hears a key (JupyterLab does after it): an arrow on a slider would
// move between cells, a 0 on the block map ask for a restart. The attribute keeps from it the keys that views and sliders know.
const KEYS = /^(Arrow.*|Page.*|Home|End|Enter|Escape|[ 0=+-])$/;
if (!SHARED.keys) {
  SHARED.keys = true;
  window.addEventListener("keydown", (event) => {
    const modified = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key.length > 1);
    if (event.target.closest?.(".ctm-desk")) event.target.toggleAttribute("data-lm-suppress-shortcuts", KEYS.test(event.key) && !modified);
  }, true);
}

function initialize({ model }) {
  const key = model.get("_key");
  const frame = { version: model.get("_spec").version, kept: [] };
  FRAMES.set(key, frame);
  const onMessage = (message, buffers) => {
    if (message.kind !== "ops" || frame.kept === null) return;
    if (message.from !== frame.version || frame.kept.length >= KEPT) frame.kept = null;
    else {
      frame.kept.push([message.ops, buffers]);
      frame.version = message.to;
    }
  };
  model.on("msg:custom", onMessage);
  return () => {
    model.off("msg:custom", onMessage);
    FRAMES.delete(key);
  };
}

// A moved slider says more than anybody can follow: of each control the newest value at most every EVERY_MS, everything else at once.
function slower(send) {
  const waiting = new Map();
  let timer = 0, last = 0;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    last = performance.now();
    for (const action of waiting.values()) send(action);
    waiting.clear();
  };
  return (action) => {
    if (action[1] === "value") {
      waiting.set(action[0], action);
      timer ||= setTimeout(flush, Math.max(0, last + EVERY_MS - performance.now()));
    } else {
      flush();
      send(action);
    }
  };
}

async function render({ model, el }) {
  const me = crypto.randomUUID?.() ?? `page-${Math.random()}`;
  const texts = model.get("_texts"), loaderId = model.get("_bokeh").replace("IPY_MODEL_", "");
  const loader = model.widget_manager.get_model(loaderId);
  let alive = true, asked = false, seen = -SEEN_MS, saying = 0, drawn = null, version = 0;
  const tell = (content) => { if (alive) model.send({ ...content, page: me }); };
  const act = slower((action) => tell({ kind: "act", action }));
  const open = () => { asked = true; tell({ kind: "open", version: drawn ? version : -1 }); };
  const say = () => {
    saying = 0;
    seen = performance.now();
    tell({ kind: "seen", version });
  };
  const draw = (spec, at) => {
    drawn?.destroy();
    version = at;
    drawn = mount(el, spec, { send: act, me, bokeh: async () => (await loader).get("source") });
  };

  const frame = FRAMES.get(model.get("_key"));
  const onMessage = (message, buffers) => {
    if (message.kind === "spec" && message.page === me) {
      asked = false;
      draw(unpack(message.spec, buffers), message.spec.version);
    } else if (message.kind === "ops") {
      if (message.from === version) {
        version = message.to;
        drawn.apply(message.ops, buffers);
      } else if (message.from > version && !asked) open(); // some were missed: ask for everything
      saying ||= setTimeout(say, Math.max(0, seen + SEEN_MS - performance.now())); // seldom, but of the last one too
    } else if (message.kind === "error" && (message.page === me || message.page === null)) drawn.fail(message.text);
  };

  draw(model.get("_spec"), model.get("_spec").version);
  if (frame?.kept) for (const [ops, buffers] of frame.kept) drawn.apply(ops, buffers);
  if (frame?.kept) version = frame.version;
  if (frame) frame.kept = null; // a second view asks for what it shows
  model.on("msg:custom", onMessage);
  open();

  const ended = (text) => {
    if (!alive) return;
    alive = false;
    const note = make("div", "ctm-ended", text);
    note.setAttribute("role", "alert");
    note.style.cssText = "margin:0 0 10px;padding:10px 14px;border-radius:8px;border:1px solid #d55e00;background:var(--panel-surface-color);"
      + "font:600 13.5px/1.45 var(--bokeh-base-font, system-ui, sans-serif);position:sticky;top:0;z-index:9";
    drawn.page.body.prepend(note);
    drawn.page.still = true;
    for (const node of drawn.page.nodes.values()) {
      node.draw();
      if (node.id === drawn.page.facts.root) node.host.style.opacity = ".6";
    }
  };
  // A kernel that is restarted from this page disconnects all its models (the loader is one that can be asked); of one that
  // crashed, or that somebody else restarted, only its status tells.
  const bokeh = await loader.catch(() => null);
  const lost = () => { if (!bokeh.comm_live) ended(texts.restarted); };
  bokeh?.on("comm_live_update", lost);
  if (bokeh && !bokeh.comm_live) lost();
  const status = model.widget_manager.kernel?.statusChanged;
  const statusChanged = (_kernel, name) => {
    if (["starting", "restarting", "autorestarting", "terminating", "dead"].includes(name)) ended(texts.restarted);
  };
  status?.connect(statusChanged);
  return () => {
    clearTimeout(saying);
    tell({ kind: "close" });
    bokeh?.off("comm_live_update", lost);
    status?.disconnect(statusChanged);
    model.off("msg:custom", onMessage);
    drawn.destroy();
  };
}

export default { initialize, render };

// Mirrors the query of the page's address. push: a new entry in the history (Back returns here); otherwise the entry is replaced, a
// moment later: a browser looks through the styles of the whole page for it, and a picture that was asked for comes first.
// Python -> here: target = {search, push, seen: the last action Python knew}. Here -> Python: action = {seq, kind: "arrived", search, width, dark}.
const LATER_MS = 150;

function render({ model, el }) {
  let seq = model.get("action")?.seq ?? 0;
  // Another page begins at its top, wherever the one before was scrolled to.
  const toTop = () => {
    for (let node = el; node; node = node.parentNode ?? node.host) if (node.scrollTop) node.scrollTop = 0;
  };
  let waiting = null; // a target, and the timer that writes it
  const settle = () => {
    if (!waiting) return;
    clearTimeout(waiting.timer);
    write(waiting.target);
    waiting = null;
  };
  const write = ({ search, push, seen }) => {
    // Back or Forward was pressed again since this was written: the answer to that is on its way.
    if (seen < seq || search === window.location.search) return;
    const address = window.location.pathname + search + window.location.hash;
    if (push) toTop();
    window.history[push ? "pushState" : "replaceState"](null, "", address);
  };
  const changed = () => {
    const target = model.get("target");
    if (target.push) {
      settle(); // Back is to return to how the page was left
      write(target);
    } else {
      clearTimeout(waiting?.timer);
      waiting = { target, timer: setTimeout(settle, LATER_MS) };
    }
  };
  const read = () => {
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    model.set("action", { seq: ++seq, kind: "arrived", search: window.location.search, width: window.innerWidth, dark });
    model.save_changes();
  };
  model.on("change:target", changed);
  window.addEventListener("popstate", read);
  read();
  return () => {
    settle();
    window.removeEventListener("popstate", read);
    model.off("change:target", changed);
  };
}

export default { render };

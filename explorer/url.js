// Mirrors the query of the page's address. push: a new entry in the history (Back returns here); otherwise the entry is replaced.
// Python -> here: target = {search, push, seen: the last action Python knew}. Here -> Python: action = {seq, kind: "arrived", search, width, dark}.
function render({ model, el }) {
  let seq = model.get("action")?.seq ?? 0;
  // Another page begins at its top, wherever the one before was scrolled to.
  const toTop = () => {
    for (let node = el; node; node = node.parentNode ?? node.host) if (node.scrollTop) node.scrollTop = 0;
  };
  const write = () => {
    const { search, push, seen } = model.get("target");
    // Back or Forward was pressed again since this was written: the answer to that is on its way.
    if (seen < seq || search === window.location.search) return;
    const address = window.location.pathname + search + window.location.hash;
    if (push) toTop();
    window.history[push ? "pushState" : "replaceState"](null, "", address);
  };
  const read = () => {
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    model.set("action", { seq: ++seq, kind: "arrived", search: window.location.search, width: window.innerWidth, dark });
    model.save_changes();
  };
  model.on("change:target", write);
  window.addEventListener("popstate", read);
  read();
  return () => {
    window.removeEventListener("popstate", read);
    model.off("change:target", write);
  };
}

export default { render };

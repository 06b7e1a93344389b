// Mirrors the query of the page's address. push: a new entry in the history (Back returns here); otherwise the entry is replaced.
// Python -> here: target = {search, push}. Here -> Python: action = {seq, kind: "arrived", search, width, dark}.
function render({ model, el }) {
  let seq = model.get("action")?.seq ?? 0;
  const write = () => {
    const { search, push } = model.get("target");
    if (search === window.location.search) return;
    const address = window.location.pathname + search + window.location.hash;
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

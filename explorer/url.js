// Mirrors the query of the page's address. push: a new entry in the history (Back returns here); otherwise the entry is replaced.
export function render({ model, el }) {
  el.style.display = "none";
  const write = () => {
    if (model.search === window.location.search) return;
    const address = window.location.pathname + model.search + window.location.hash;
    window.history[model.push ? "pushState" : "replaceState"](null, "", address);
  };
  const read = () => {
    model.arrived = { seq: Date.now(), search: window.location.search, width: window.innerWidth };
  };
  model.on("search", write);
  window.addEventListener("popstate", read);
  model.on("remove", () => window.removeEventListener("popstate", read));
  read();
}

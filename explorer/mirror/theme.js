// Colours of what the runtime draws: CSS variables that all our stylesheets mix from, and the same for Bokeh's figures.
const THEMES = {
  light: { ink: "#1c2024", paper: "#ffffff", primary: "#0072b2" },
  dark: { ink: "#e8eaed", paper: "#16191d", primary: "#56b4e9" },
};

// JupyterLab and Notebook say it on the body, VS Code by a class, a page of our own on the root; the system decides otherwise.
function isDark() {
  const { body, documentElement: root } = document;
  if (root.dataset.theme) return root.dataset.theme === "dark";
  if (body?.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  if (body?.classList.contains("vscode-light") || body?.classList.contains("vscode-high-contrast-light")) return false;
  if (body?.classList.contains("vscode-dark") || body?.classList.contains("vscode-high-contrast")) return true;
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Calls back now and whenever the page turns light or dark; returns how to stop.
function followTheme(changed) {
  let last = null;
  const look = () => {
    const dark = isDark();
    if (dark !== last) changed((last = dark));
  };
  const observer = new MutationObserver(look);
  const filter = { attributes: true, attributeFilter: ["class", "data-theme", "data-jp-theme-light", "data-vscode-theme-kind"] };
  for (const node of [document.documentElement, document.body]) if (node) observer.observe(node, filter);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const systemChanged = () => {
    look();
    document.documentElement.setAttribute("data-ct-theme", last ? "dark" : "light"); // canvases watch the root's attributes
  };
  system.addEventListener("change", systemChanged);
  look();
  return () => {
    observer.disconnect();
    system.removeEventListener("change", systemChanged);
  };
}

function paintRoot(el, dark) {
  const { ink, paper, primary } = THEMES[dark ? "dark" : "light"];
  const values = { "--bokeh-base-font": "var(--jp-ui-font-family, system-ui, sans-serif)", "--panel-on-surface-color": ink, "--panel-surface-color": paper, "--panel-primary-color": primary, "color-scheme": dark ? "dark" : "light" };
  for (const [name, value] of Object.entries(values)) el.style.setProperty(name, value);
}

// What is drawn of a Bokeh document besides its data. Nothing is set that is switched off (null).
function paintFigure(doc, dark) {
  const { ink } = THEMES[dark ? "dark" : "light"];
  const quiet = dark ? "#aab0b8" : "#4b525a", line = dark ? "#3a4048" : "#d9dce0";
  const colours = {
    background_fill_color: null, border_fill_color: null, axis_label_text_color: ink, major_label_text_color: quiet,
    axis_line_color: quiet, major_tick_line_color: quiet, grid_line_color: line, title_text_color: ink, label_text_color: ink,
  };
  for (const root of doc.roots()) {
    for (const model of root.references()) {
      const now = {};
      for (const [name, colour] of Object.entries(colours)) {
        if (!(name in model.properties)) continue;
        const paints = /^(background|border)/.test(name);
        if (paints ? /Plot|Figure|GridPlot/.test(model.type) : model[name] !== null) now[name] = colour;
      }
      if (Object.keys(now).length) model.setv(now, { sync: false });
    }
  }
}

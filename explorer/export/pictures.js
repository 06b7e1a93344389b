// Pictures made in the browser: the page as a PNG, its Bokeh figures as SVG. Nothing leaves this machine.
//
// The page lives in nested shadow roots, with canvases among them. It is copied into one plain tree in which every element carries
// its computed style and every canvas its pixels; that tree goes into an SVG's foreignObject, and this is drawn on a canvas.
const PICTURE_LIMIT = 16384; // pixels of either side: beyond, browsers give an empty canvas
const SKIPPED = new Set(["SCRIPT", "STYLE", "LINK", "TEMPLATE", "NOSCRIPT", "IFRAME"]);
const XHTML = "http://www.w3.org/1999/xhtml";

// What an element of this name looks like by itself: only what differs is written down.
const plainStyles = new Map();
function plainStyle(name, frame) {
  if (!plainStyles.has(name)) {
    const made = frame.contentDocument.createElement(name);
    frame.contentDocument.body.append(made);
    const style = frame.contentWindow.getComputedStyle(made);
    plainStyles.set(name, Object.fromEntries([...style].map((key) => [key, style.getPropertyValue(key)])));
    made.remove();
  }
  return plainStyles.get(name);
}

function styleText(element, frame) {
  const style = getComputedStyle(element);
  const plain = plainStyle(element.localName, frame);
  let text = "";
  for (const key of style) {
    if (key.startsWith("transition") || key.startsWith("animation")) continue;
    const value = style.getPropertyValue(key);
    if (plain[key] !== value || key === "width" || key === "height") text += `${key}:${value};`;
  }
  return text;
}

// What CSS decides of a shape in an SVG.
const SHAPE_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "font", "text-anchor", "vector-effect", "display"];
function copiedShape(node, frame) {
  const made = node.cloneNode(false);
  const style = getComputedStyle(node);
  const shape = SHAPE_STYLES.map((key) => `${key}:${style.getPropertyValue(key)};`).join("");
  made.setAttribute("style", (node.localName === "svg" ? styleText(node, frame) : "") + shape);
  for (const child of node.childNodes) made.append(child instanceof SVGElement ? copiedShape(child, frame) : child.cloneNode(true));
  return made;
}

// The fonts that the page has loaded, inside the picture: an image may fetch nothing.
async function fontFaces() {
  const loaded = new Set([...document.fonts].filter((f) => f.status === "loaded").map((f) => `${f.family.replaceAll('"', "")}|${f.weight}|${f.unicodeRange}`));
  const faces = new Map(); // address of the file -> its rule; of two, the one that says for which characters
  const look = (rules, base) => {
    for (const rule of rules) {
      if (!(rule instanceof CSSFontFaceRule)) continue;
      const get = (key) => rule.style.getPropertyValue(key);
      const face = new FontFace("x", "local(x)", { unicodeRange: get("unicode-range") || "U+0-10FFFF", weight: get("font-weight") || "normal" });
      if (!loaded.has(`${get("font-family").replaceAll('"', "")}|${face.weight}|${face.unicodeRange}`)) continue;
      const url = /url\(["']?([^"')]+)["']?\)/.exec(get("src"))?.[1];
      const address = url && new URL(url, base).href;
      if (address && !(faces.has(address) && !get("unicode-range"))) faces.set(address, rule);
    }
  };
  for (const sheet of [...document.styleSheets, ...document.adoptedStyleSheets]) {
    try { look(sheet.cssRules, sheet.href ?? document.baseURI); } catch { /* a sheet of another origin: not ours */ }
  }
  const texts = await Promise.all([...faces].map(async ([url, rule]) => {
    const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
    const data = url.startsWith("data:") ? url : `data:font/woff2;base64,${toBase64(bytes)}`;
    return rule.cssText.replace(/src:[^;]+;/, `src: url("${data}");`);
  }));
  return texts.join("\n");
}

// The first element with this class, in whichever shadow root it lives.
function deepFind(name, from = document) {
  const here = from.querySelector(`.${name}`);
  if (here) return here;
  for (const element of from.querySelectorAll("*")) {
    const found = element.shadowRoot && deepFind(name, element.shadowRoot);
    if (found) return found;
  }
  return null;
}

function shownChildren(element) {
  if (element.localName === "slot") {
    const given = element.assignedNodes();
    return given.length ? given : [...element.childNodes];
  }
  return [...(element.shadowRoot ?? element).childNodes];
}

function copied(node, frame) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  if (!(node instanceof Element) || SKIPPED.has(node.tagName)) return null;
  const style = getComputedStyle(node);
  if (style.display === "none") return null;
  if (node.classList.contains("ct-not-in-pictures")) return null;
  if (node instanceof SVGElement) return copiedShape(node, frame);
  let made;
  if (node instanceof HTMLCanvasElement) {
    made = document.createElementNS(XHTML, "img");
    if (node.width && node.height) made.setAttribute("src", node.toDataURL("image/png"));
  } else {
    const name = node.localName.includes("-") || node.localName === "slot" ? "div" : node.localName;
    made = document.createElementNS(XHTML, name);
    for (const { name: key, value } of node.attributes) if (!/^(on|style$|class$|id$|src$|href$)/.test(key)) made.setAttribute(key, value);
    if (node instanceof HTMLInputElement) made.setAttribute("value", node.value);
    if (node instanceof HTMLOptionElement && node.selected) made.setAttribute("selected", "");
    if (node instanceof HTMLInputElement && node.checked) made.setAttribute("checked", "");
  }
  made.setAttribute("style", (node.localName === "slot" ? "display:contents;" : "") + styleText(node, frame));
  if (node instanceof HTMLTextAreaElement) made.textContent = node.value;
  else for (const child of shownChildren(node)) {
    const copy = copied(child, frame);
    if (copy) made.append(copy);
  }
  return made;
}

// The element with everything in it, also what is scrolled out of sight, as a PNG blob.
async function pagePicture(element) {
  const frame = document.createElement("iframe"); // a document without our stylesheets, to learn what is plain
  frame.style.cssText = "position:absolute;width:0;height:0;border:0;visibility:hidden";
  document.body.append(frame);
  try {
    const width = Math.ceil(element.scrollWidth), height = Math.ceil(element.scrollHeight);
    const copy = copied(element, frame);
    copy.style.cssText += `;position:static;overflow:visible;width:${width}px;height:${height}px;max-height:none;margin:0;`;
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><style>${(await fontFaces()).replaceAll("<", "")}</style><foreignObject x="0" y="0" width="100%" height="100%">${new XMLSerializer().serializeToString(copy)}</foreignObject></svg>`;
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    const scale = Math.min(window.devicePixelRatio || 1, PICTURE_LIMIT / Math.max(width, height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture"))), "image/png"));
  } finally {
    frame.remove();
  }
}

// Every Bokeh figure that is on the page, as SVG blobs: BokehJS draws itself once more, into SVG.
async function figurePictures() {
  const found = [];
  const walk = (view) => {
    if (view.model?.type === "Figure") found.push(view);
    else for (const child of view.children_views?.() ?? []) walk(child);
  };
  for (const root of window.Bokeh?.index?.roots ?? []) walk(root);
  const shown = found.filter((view) => view.el?.isConnected && view.bbox.width > 0);
  return Promise.all(shown.map((view) => view.export("svg").to_blob()));
}

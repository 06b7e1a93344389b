// The block tables of the requests. One file for Panel (AnyWidgetComponent) and notebooks (anywidget).
//
// model: rows [{id, owner, colour: [light, dark], status, tokens, blocks, cached, fill, size, chips, cut, skipped}],
//        chips [[logical, physical, ref_count], ...] of which the first `cut` are followed by `skipped` that are left out;
//        omitted, message; selected_request "" or an id, selected_block -1 or a physical block
const STYLE = `
.ctw-tables{font-size:13px;line-height:1.4;color:var(--panel-on-surface-color,inherit);font-family:inherit;max-height:420px;overflow-y:auto}
.ctw-row{padding:8px 0 10px;border-top:1px solid color-mix(in srgb,currentColor 12%,transparent);--c:#888}
.ctw-row:first-of-type{border-top:0}
.ctw-row.faded{opacity:.45}
.ctw-head{display:flex;flex-wrap:wrap;align-items:center;gap:3px 12px;width:100%;font:inherit;color:inherit;background:transparent;border:0;
 padding:2px 4px;margin:0 0 4px;border-radius:6px;cursor:pointer;text-align:left}
.ctw-head:hover{background:color-mix(in srgb,currentColor 6%,transparent)}
.ctw-head:focus-visible,.ctw-chips:focus-visible{outline:2px solid currentColor;outline-offset:1px}
.ctw-dot{width:12px;height:12px;border-radius:4px;background:var(--c);flex:none}
.ctw-head b{font-weight:620}
.ctw-head span.dim{opacity:.75;font-variant-numeric:tabular-nums}
.ctw-gauge{display:inline-flex;align-items:center;gap:6px;margin-left:auto;font-variant-numeric:tabular-nums}
.ctw-gauge i{display:block;width:64px;height:8px;border-radius:4px;background:color-mix(in srgb,currentColor 13%,transparent);overflow:hidden}
.ctw-gauge i>u{display:block;height:100%;background:var(--c)}
.ctw-chips{display:flex;flex-wrap:wrap;gap:3px;padding:0 4px;border-radius:6px}
.ctw-chip{display:inline-flex;flex-direction:column;align-items:center;min-width:30px;padding:1px 4px 2px;border-radius:5px;cursor:pointer;
 background:color-mix(in srgb,var(--c) 17%,transparent);border:1px solid color-mix(in srgb,var(--c) 60%,transparent);line-height:1.15;
 font-variant-numeric:tabular-nums;box-sizing:border-box}
.ctw-chip small{font-size:9.5px;opacity:.72}
.ctw-chip span{font-size:12px;font-weight:600}
.ctw-chip.shared{background:repeating-linear-gradient(135deg,color-mix(in srgb,var(--c) 40%,transparent) 0 3px,color-mix(in srgb,var(--c) 12%,transparent) 3px 7px)}
.ctw-chip:hover,.ctw-chip.cursor{border-color:currentColor}
.ctw-chip.on{outline:2px solid currentColor;outline-offset:0}
.ctw-skip{align-self:center;opacity:.75;padding:0 4px}
.ctw-note{opacity:.75;padding:8px 4px}`;

const luminance = (css) => {
  const [r, g, b] = (css.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
  return 0.3 * r + 0.59 * g + 0.11 * b;
};

class BlockTables {
  constructor(model, el) {
    this.model = model;
    this.seen = new Map();  // request id -> {node, key, chips}
    this.root = add(el, "div", "ctw-tables");
    add(this.root, "style", "", STYLE);
    this.list = add(this.root, "div", "");
    this.note = add(this.root, "div", "ctw-note");
    this.root.cutaway = this;
    this.off = [];
    for (const name of ["rows", "omitted", "message", "selected_request", "selected_block"]) {
      const f = () => this.schedule();
      model.on(`change:${name}`, f);
      this.off.push(() => model.off(`change:${name}`, f));
    }
    this.themes = new MutationObserver(() => { this.seen.forEach((row) => { row.key = ""; }); this.schedule(); });
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true });
    this.draw();
  }

  schedule() { if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); }); }

  draw() {
    const rows = this.model.get("rows") || [], selected = this.model.get("selected_request") || "", block = this.model.get("selected_block") ?? -1;
    const request = rows.some((row) => row.id === selected) ? selected : "";  // one that holds no block leaves the others as they are
    const dark = luminance(getComputedStyle(this.root).color) > 128, ids = new Set(rows.map((row) => row.id));
    for (const [id, row] of this.seen) if (!ids.has(id)) { row.node.remove(); this.seen.delete(id); }
    let before = null;
    for (const row of rows) {
      let entry = this.seen.get(row.id);
      if (!entry) { entry = this.open(row.id); this.seen.set(row.id, entry); }
      const key = JSON.stringify([row, request, block, dark]);
      if (entry.key !== key) { this.fill(entry, row, request, block, dark); entry.key = key; }
      const next = before ? before.nextSibling : this.list.firstChild;
      if (next !== entry.node) this.list.insertBefore(entry.node, next);
      before = entry.node;
    }
    const omitted = this.model.get("omitted") || 0;
    const text = rows.length ? (omitted ? `${omitted} more requests are not listed.` : "") : this.model.get("message") || "";
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.hidden = !text;
  }

  open(id) {
    const node = make("div", "ctw-row"), head = add(node, "button", "ctw-head"), strip = add(node, "div", "ctw-chips");
    head.type = "button";
    const entry = { node, head, strip, key: "", chips: [], cursor: -1 };
    strip.tabIndex = 0;
    strip.setAttribute("role", "listbox");
    strip.setAttribute("aria-label", `block table of ${id}`);
    head.addEventListener("click", () => this.set("selected_request", this.model.get("selected_request") === id ? "" : id));
    strip.addEventListener("click", (e) => {
      const chip = e.target.closest(".ctw-chip");
      if (chip) this.pick(id, Number(chip.dataset.block));
    });
    strip.addEventListener("keydown", (e) => {
      const last = entry.chips.length - 1, moves = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last };
      if (e.key in moves) entry.cursor = entry.cursor < 0 ? 0 : Math.max(0, Math.min(last, entry.cursor + moves[e.key]));
      else if ((e.key === "Enter" || e.key === " ") && entry.chips[entry.cursor]) this.pick(id, Number(entry.chips[entry.cursor].dataset.block));
      else return;
      this.point(entry);
      e.preventDefault(); e.stopPropagation();  // the transport bar listens to the same keys
    });
    strip.addEventListener("blur", () => { entry.cursor = -1; this.point(entry); });
    return entry;
  }

  point(entry) {
    entry.chips.forEach((chip, i) => chip.classList.toggle("cursor", i === entry.cursor));
    const chip = entry.chips[entry.cursor];
    if (chip) { chip.scrollIntoView({ block: "nearest" }); entry.strip.setAttribute("aria-activedescendant", chip.id); }
    else entry.strip.removeAttribute("aria-activedescendant");
  }

  fill(entry, row, request, block, dark) {
    entry.node.style.setProperty("--c", row.colour[dark ? 1 : 0]);
    entry.node.classList.toggle("faded", Boolean(request) && request !== row.id);
    entry.head.setAttribute("aria-pressed", String(request === row.id));
    entry.head.textContent = "";
    add(entry.head, "span", "ctw-dot");
    add(entry.head, "b", "", row.id);
    add(entry.head, "span", "", row.status);
    add(entry.head, "span", "dim", `${row.tokens} tokens in ${row.blocks} blocks`);
    if (row.cached) add(entry.head, "span", "dim", `${row.cached} tokens from the prefix cache`);
    if (row.blocks) {
      const gauge = add(entry.head, "span", "ctw-gauge");
      add(gauge, "span", "", `last block ${row.fill}/${row.size}`);
      add(add(gauge, "i", ""), "u", "").style.width = `${100 * row.fill / row.size}%`;
    }
    this.fillChips(entry, row, block);
  }

  // Chips that are there already are changed in place: a table grows at its end.
  fillChips(entry, row, block) {
    if (entry.skip) { entry.skip.remove(); entry.skip = null; }
    row.chips.forEach(([logical, physical, refs], i) => {
      let chip = entry.chips[i];
      if (!chip) {
        chip = entry.chips[i] = add(entry.strip, "span", "ctw-chip");
        chip.id = `ctw-${row.id}-${i}`;
        chip.setAttribute("role", "option");
        add(chip, "small", ""); add(chip, "span", "");
      }
      const key = `${logical}/${physical}/${refs}`;
      if (chip.key !== key) {
        chip.key = key;
        chip.firstChild.textContent = String(logical);
        chip.lastChild.textContent = refs > 1 ? `${physical} ×${refs}` : String(physical);
        chip.dataset.block = physical;
        chip.title = `logical block ${logical} → physical block ${physical}, ref_count ${refs}`;
        chip.setAttribute("aria-label", chip.title);
      }
      chip.classList.toggle("shared", refs > 1);
      chip.classList.toggle("on", physical === block);
      chip.setAttribute("aria-selected", String(physical === block));
    });
    entry.chips.splice(row.chips.length).forEach((chip) => chip.remove());
    if (row.skipped > 0) {
      entry.skip = make("span", "ctw-skip", `… ${row.skipped} more …`);
      entry.strip.insertBefore(entry.skip, entry.chips[row.cut] || null);
    }
  }

  pick(id, block) {
    const again = this.model.get("selected_block") === block;
    this.model.set("selected_block", again ? -1 : block);
    this.model.set("selected_request", again ? "" : id);
    this.model.save_changes();
  }

  set(name, value) { this.model.set(name, value); this.model.save_changes(); }

  remove() {
    this.off.forEach((f) => f());
    this.themes.disconnect();
    cancelAnimationFrame(this.pending);
    this.root.remove();
  }
}

function render({ model, el }) {
  const tables = new BlockTables(model, el);
  return () => tables.remove();
}

export default { render };

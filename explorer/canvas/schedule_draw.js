// The tracks of the schedule, drawn: slots, tokens of each step, queue, axis. Put in front of schedule.js, whose class has the data.
const GUTTER = 46, HEAD = 17, TOKENS = 92, QUEUE = 46, AXIS = 22;

class Tracks {
  layout() {
    const [from, to] = this.window(), extent = this.model.get("extent"), time = this.model.get("axis") === "time", phone = this.width < 500;
    let slots = 1;
    for (let i = from; i < to; i += 1) slots = Math.max(slots, Math.min(64, this.steps[i].slots));
    this.bars.forEach((row, slot) => { if (slot >= slots && row.length && row[row.length - 1].i1 > from && row.some((bar) => bar.i1 > from && bar.i0 < to)) slots = slot + 1; });
    const height = Math.max(5, Math.min(20, Math.floor((extent.length ? 200 : 300) / slots)));
    const left = phone ? 30 : GUTTER, room = this.width - left - 4;
    const [first, last] = time
      ? (extent.length ? [extent[2], extent[2] + extent[1]] : [this.steps[from].t0, this.steps[to - 1].t1])
      : (extent.length ? [0, extent[0]] : [from, Math.max(to, from + Math.min(this.span, 40))]);
    const scale = room / Math.max(last - first, 1e-9);
    const y = { slots: HEAD, tokens: 2 * HEAD + slots * height + 4, queue: 3 * HEAD + slots * height + TOKENS + 8 };
    return {
      from, to, slots, height, left, room, first, last, scale, time, y, bottom: y.queue + QUEUE,
      x0: (i) => left + ((time ? this.steps[i].t0 : i) - first) * scale, x1: (i) => left + ((time ? this.steps[i].t1 : i + 1) - first) * scale,
      at: (value) => left + (value - first) * scale,
    };
  }

  title(ctx, text, y, l, right = "") {
    ctx.fillStyle = this.paint.faint(0.72);
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillText(text, l.left, y - 5);
    ctx.textAlign = "right";
    ctx.fillText(right, this.width - 4, y - 5);
  }

  drawSlots(ctx, l) {
    const p = this.paint, top = l.y.slots, selected = this.model.get("selected");
    this.title(ctx, this.texts.slots, top, l);
    ctx.save();
    ctx.beginPath();
    ctx.rect(l.left, top, l.room + 1, l.slots * l.height);
    ctx.clip();
    for (let slot = 0; slot < l.slots; slot += 1) {
      const y = top + slot * l.height, row = this.bars[slot] || [], tall = l.height - (l.height > 7 ? 2 : 1);
      ctx.fillStyle = p.faint(slot % 2 ? 0.035 : 0.06);
      ctx.fillRect(l.left, y, l.room, tall);
      for (let b = row.length - 1; b >= 0 && row[b].i1 > l.from; b -= 1) {
        const bar = row[b];
        if (bar.i0 >= l.to) continue;
        const x0 = l.time ? l.at(bar.t0) : l.at(bar.i0), x1 = l.time ? l.at(bar.t1) : l.at(bar.i1);
        const width = Math.max(x1 - x0, 0.7), from = y + bar.low * tall, high = (bar.high - bar.low) * tall;
        ctx.globalAlpha = selected >= 0 && bar.request !== selected ? 0.3 : 1;
        p.bar(ctx, bar.phase, x0, from, width, high);
        const before = row[b - 1];
        if (bar.phase <= DECODE && (!before || before.request !== bar.request) && width > 3) {  // where a request begins
          ctx.fillStyle = p.paper;
          ctx.fillRect(x0, y, 1.5, tall);
        }
        if (high >= 10 && bar.phase <= DECODE && width > 16) this.letter(ctx, bar, Math.max(x0, l.left), x1, from + high / 2);
      }
      ctx.globalAlpha = 1;
    }
    this.drawMarks(ctx, l);
    ctx.restore();
    ctx.fillStyle = p.faint(0.65);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / l.height));
    for (let slot = 0; slot < l.slots; slot += every) ctx.fillText(String(slot), l.left - 7, top + (slot + 0.5) * l.height - 1);
  }

  letter(ctx, bar, x0, x1, y) {
    const name = this.names[bar.request] || "", short = name.slice(name.lastIndexOf("-") + 1);
    const text = [name, short].find((each) => each && 6.4 * each.length + 6 < x1 - x0);
    if (!text) return;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    if (bar.phase === PREFILL) {
      ctx.fillStyle = this.paint.base[PREFILL];
      ctx.fillRect(x0 + 3, y - 6, 6.4 * text.length + 2, 12);
    }
    ctx.fillStyle = this.paint.onFill[bar.phase];
    ctx.fillText(text, x0 + 4, y + 0.5);
  }

  drawMarks(ctx, l) {
    let free = -1e9;
    for (const [step, text] of this.marks) {
      const i = this.indexOf(step) + 1;
      if (i < l.from || i > l.to || !i) continue;
      const x = i < this.steps.length ? l.x0(i) : l.x1(i - 1);
      ctx.strokeStyle = this.paint.ink;
      ctx.setLineDash([4, 3]);
      ctx.lineWidth = 1.2;
      ctx.beginPath();
      ctx.moveTo(x, l.y.slots);
      ctx.lineTo(x, l.y.slots + l.slots * l.height);
      ctx.stroke();
      ctx.setLineDash([]);
      if (x < free) continue;
      const width = ctx.measureText(text).width + 8, from = Math.min(x, l.left + l.room - width);
      ctx.fillStyle = this.paint.ink;
      ctx.fillRect(from, l.y.slots, width, 14);
      ctx.fillStyle = this.paint.paper;
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      ctx.fillText(text, from + 4, l.y.slots + 7.5);
      free = from + width + 4;
    }
  }

  drawTokens(ctx, l) {
    const p = this.paint, top = l.y.tokens, base = top + TOKENS, selected = this.model.get("selected");
    let most = 1;
    for (let i = l.from; i < l.to; i += 1) most = Math.max(most, this.steps[i].tokens);
    const budget = this.steps[l.to - 1].budget, seen = budget <= 2.5 * most, high = seen ? Math.max(most, budget) : most * 1.08, scale = TOKENS / high;
    this.title(ctx, this.texts.tokens, top, l, seen ? "" : this.texts.beyond.replace("{n}", budget));
    let painted = -1;  // the last pixel that has a column: of steps narrower than one only the tallest is drawn
    for (let i = l.from; i < l.to; i += 1) {
      let from = i;
      const pixel = Math.floor(l.x0(i));
      if (l.x1(i) - l.x0(i) < 1) {
        if (pixel === painted) continue;
        for (let j = i; j < l.to && Math.floor(l.x0(j)) === pixel; j += 1) if (this.steps[j].tokens > this.steps[from].tokens) from = j;
        painted = pixel;
      }
      this.column(ctx, this.steps[from], l.x0(i), Math.max(1, l.x1(i) - l.x0(i)), base, scale, selected);
    }
    ctx.strokeStyle = p.faint(0.4);
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(l.left, base + 0.5);
    ctx.lineTo(l.left + l.room, base + 0.5);
    ctx.stroke();
    if (seen) this.drawBudget(ctx, l, base, scale);
    ctx.fillStyle = p.faint(0.65);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(String(Math.round(high)), l.left - 7, top + 6);
    ctx.fillText("0", l.left - 7, base - 4);
  }

  column(ctx, step, x, width, base, scale, selected) {
    const gap = width > 4 ? 1 : 0, { cells } = step;
    let y = base;
    for (const phase of [DECODE, PREFILL, PADDING]) {
      const start = y;
      let chosen = null;
      for (let c = 0; c < cells.length; c += 4) {
        if (cells[c] >> 16 !== phase) continue;
        const high = cells[c + 2] * scale;
        if (cells[c + 1] === selected) chosen = [y - high, high];
        y -= high;
        if (phase !== DECODE || scale >= 4) {
          this.paint.bar(ctx, phase, x, y, width - gap, Math.max(0.5, high - (high > 3 ? 1 : 0)));
        }
      }
      if (phase === DECODE && scale < 4 && y < start) this.paint.bar(ctx, phase, x, y, width - gap, start - y);
      if (chosen) {
        ctx.strokeStyle = this.paint.ink;
        ctx.lineWidth = 2;
        ctx.strokeRect(x + 1, chosen[0], Math.max(1, width - gap - 2), Math.max(1.5, chosen[1]));
      }
    }
  }

  drawBudget(ctx, l, base, scale) {
    const p = this.paint;
    ctx.strokeStyle = p.ink;
    ctx.lineWidth = 1.4;
    ctx.setLineDash([6, 3]);
    ctx.beginPath();
    for (let i = l.from; i < l.to; i += 1) {
      const y = base - this.steps[i].budget * scale;
      if (i === l.from) ctx.moveTo(l.x0(i), y);
      else ctx.lineTo(l.x0(i), y);
      ctx.lineTo(l.x1(i), y);
    }
    ctx.stroke();
    ctx.setLineDash([]);
    const last = this.steps[l.to - 1], y = Math.max(base - last.budget * scale, l.y.tokens + 1);
    const text = `${this.texts.budget} ${last.budget}`, width = ctx.measureText(text).width + 6;
    ctx.globalAlpha = 0.85;
    ctx.fillStyle = p.paper;
    ctx.fillRect(this.width - width - 4, y + 1.5, width, 14);
    ctx.globalAlpha = 1;
    ctx.fillStyle = p.ink;
    ctx.textAlign = "right";
    ctx.textBaseline = "top";
    ctx.fillText(text, this.width - 7, y + 3);
  }

  drawQueue(ctx, l) {
    const p = this.paint, top = l.y.queue, base = top + QUEUE;
    let most = 1, waits = 0;
    for (let i = l.from; i < l.to; i += 1) most = Math.max(most, this.steps[i].waiting, this.steps[i].running);
    const line = (name, close) => {
      ctx.beginPath();
      for (let i = l.from; i < l.to; i += 1) {
        const y = base - (this.steps[i][name] / most) * (QUEUE - 3);
        if (i === l.from) ctx.moveTo(l.x0(i), close ? base : y);
        ctx.lineTo(l.x0(i), y);
        ctx.lineTo(l.x1(i), y);
      }
      if (close) ctx.lineTo(l.x1(l.to - 1), base);
    };
    for (let i = l.from; i < l.to; i += 1) waits = this.steps[i].waiting;
    line("waiting", true);
    ctx.fillStyle = p.faint(0.28);
    ctx.fill();
    line("waiting", false);
    ctx.strokeStyle = p.faint(0.85);
    ctx.lineWidth = 1.4;
    ctx.stroke();
    line("running", false);
    ctx.strokeStyle = p.base[DECODE];
    ctx.setLineDash([5, 2]);
    ctx.stroke();
    ctx.setLineDash([]);
    const last = this.steps[l.to - 1];
    this.title(ctx, this.texts.queue, top, l, `▬ ${this.texts.waiting} ${waits}   ┅ ${this.texts.running} ${last.running}`);
    ctx.strokeStyle = p.faint(0.4);
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(l.left, base + 0.5);
    ctx.lineTo(l.left + l.room, base + 0.5);
    ctx.stroke();
    ctx.fillStyle = p.faint(0.65);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(String(most), l.left - 7, top + 5);
  }

  drawAxis(ctx, l) {
    const wanted = Math.max(2, Math.floor(l.room / 90)), range = l.last - l.first, raw = range / wanted;
    const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1e-6))), nice = [1, 2, 5, 10].find((n) => n * power >= raw) * power;
    const begin = this.model.get("extent").length && l.time ? l.first : 0;
    ctx.fillStyle = this.paint.faint(0.65);
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    if (l.time) {
      for (let t = Math.ceil((l.first - begin) / nice) * nice; t <= l.last - begin; t += nice) ctx.fillText(`${Number(t.toFixed(4))} s`, l.at(t + begin), l.bottom + 6);
      return;
    }
    const every = Math.max(1, Math.round(nice)), fixed = this.model.get("extent").length > 0;
    for (let i = l.from; i < l.to; i += 1) {
      const number = fixed ? i : this.steps[i].step;
      if (number % every === 0) ctx.fillText(String(number), (l.x0(i) + l.x1(i)) / 2, l.bottom + 6);
    }
  }

  drawHere(ctx, l) {
    const draw = (i, colour, width) => {
      if (i < l.from || i >= l.to) return;
      ctx.strokeStyle = colour;
      ctx.lineWidth = width;
      const x0 = l.x0(i), x1 = Math.max(l.x1(i), x0 + 2);
      ctx.strokeRect(x0, l.y.slots - 1, x1 - x0, l.bottom - l.y.slots + 2);
    };
    if (!this.model.get("live")) draw(this.indexOf(this.model.get("at")), "#d55e00", 2);
    if (this.pointed) draw(this.pointed[0], this.paint.faint(0.6), 1);
  }
}

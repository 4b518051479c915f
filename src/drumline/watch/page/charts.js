"use strict";
// Curves of one or several runs. A faint line has every extreme; with smoothing, a strong line has the means.
const FIRST = ["lr", "grad_norm", "tokens_per_s", "samples_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "perplexity", "bits_per_byte"];
const view = { axis: memory.get("axis") || "step", smoothing: Number(memory.get("smoothing") || 0), log: memory.get("log") === "1", range: null };
const POWERS = [...Array(50).keys()].map((power) => 2 ** power);
const charts = new Map();
const cursors = typeof uPlot === "undefined" ? null : uPlot.sync("curves");

// From both ends, so that the smooth line does not lag behind.
function smoothed(y, weight) {
  const pass = (values) => { let sum = 0, norm = 0; return values.map((value) => { sum = sum * weight + value; norm = norm * weight + 1; return sum / norm; }); };
  const forward = pass(y), backward = pass([...y].reverse()).reverse();
  return forward.map((value, index) => (value + backward[index]) / 2);
}
// The lines of a chart: what, of which run, and how it looks.
function linesOf(names, shown, curves) {
  const lines = [], several = shown.length > 1;
  shown.forEach((run, index) => {
    for (const name of names) {
      const curve = curves[run.name]?.curves[name];
      if (!curve) continue;
      const held = name === "valid_loss" && names.length > 1, few = curve.x.length < 60;
      const stroke = held && !several ? colorOf(run.color + 1) : colorOf(run.color);
      const label = several ? (held ? `${run.name} (${t("held_out")})` : run.name) : held ? t("held_out") : names.length > 1 ? t("train") : "";
      const smooth = view.smoothing > 0 && !held && !few;
      lines.push({ run: run.name, name, held, label, stroke, x: curve.x, y: curve.y, faint: smooth, dash: held && several ? [5, 4] : undefined, points: held || (few && curve.x.length < 40), quiet: smooth });
      if (smooth) lines.push({ run: run.name, name, held, label, stroke, x: curve.mx, y: smoothed(curve.my, view.smoothing), strong: true });
    }
  });
  return lines;
}
const positive = (y) => (view.log ? y.map((value) => (value > 0 ? value : null)) : y);
const tables = (lines) => (lines.length ? uPlot.join(lines.map((line) => [line.x, positive(line.y)])) : [[]]);

class Chart {
  constructor(place, names, { height, title, marks, log }) {
    Object.assign(this, { place, names, height, title, marks, canLog: log });
    this.readout = h("div", { class: "readout" });
    this.plotPlace = h("div", { class: "plot" });
    this.why = h("div", { class: "why" });
    fill(place, h("div", { class: "chart-head" }, h("h3", {}, title), this.readout), this.plotPlace, this.why);
  }
  get shape() { return JSON.stringify([this.lines.map((line) => [line.run, line.name, line.stroke, line.faint, line.points]), view.axis, view.log, language, isDark(), this.plotPlace.clientWidth]); }
  draw(shown, curves) {
    this.lines = linesOf(this.names, shown, curves);
    const columns = tables(this.lines);
    if (this.plot && this.drawn === this.shape) this.plot.setData(columns);
    else { this.plot?.destroy(); this.drawn = this.shape; this.plot = new uPlot(this.options(), columns, this.plotPlace); }
    this.tell(null);
  }
  options() {
    const style = styleOf(this.names[0]), axis = AXIS_STYLES[view.axis], font = `11px ${css("--font")}`;
    const look = { stroke: css("--muted"), font, grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 } };
    return {
      width: Math.max(80, this.plotPlace.clientWidth), height: this.height, legend: { show: false }, pxAlign: 0,
      cursor: { sync: { key: "curves", scales: ["x", null] }, y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, bind: { dblclick: () => () => { app.zoom(null); return null; } } },
      scales: { x: { time: false, range: (u, low, high) => view.range || (low === high ? [low - 1, high + 1] : [low, high]) }, y: view.log && this.canLog ? { distr: 3 } : {} },
      axes: [{ ...look, size: 30, space: 64, values: (u, values) => values.map((value) => axis.axis(value)) }, { ...look, size: 58, space: 34, ...(this.names[0] === "peak_memory_bytes" ? { incrs: POWERS } : {}), values: (u, values) => values.map((value) => (value == null ? "" : style.axis(value))) }],
      series: [{}, ...this.lines.map((line) => ({ stroke: line.faint ? line.stroke + "55" : line.stroke, width: line.strong ? 1.8 : line.faint ? 1 : 1.4, dash: line.dash, spanGaps: true, points: { show: line.points, size: 5, fill: line.stroke, stroke: line.stroke } }))],
      hooks: { ready: [(u) => u.over.addEventListener("click", (event) => this.ask(u.posToVal(event.offsetX, "x")))], setCursor: [(u) => this.tell(u.cursor.idx)], setSelect: [(u) => { const { left, width } = u.select; if (width > 4) app.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }], drawClear: this.marks ? [(u) => this.drawMarks(u)] : [] },
    };
  }
  // Which documents made this step what it was: the command that says so.
  ask(x) {
    const line = this.lines.find((each) => each.name === "loss" && !each.strong), path = line && app.details[line.run]?.path;
    if (view.axis !== "step" || !path) return;
    const step = line.x[nearest(line.x, x)];
    fill(this.why, `${t("why_step")} ${step}? `, h("code", {}, `drumline blame ${quoted(path)} --step ${step} --losses`));
  }
  // Restarts, rollbacks and the like, as thin lines behind the curves.
  drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save(); ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]); ctx.lineWidth = devicePixelRatio;
    for (const mark of this.marks()) {
      const x = Math.round(u.valToPos(mark.x, "x", true));
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = css(mark.bad ? "--bad" : "--warn"); ctx.globalAlpha = 0.55; ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  }
  // The values at the cursor, or the last ones.
  tell(index) {
    const style = styleOf(this.names[0]), parts = [];
    if (!this.plot && index != null) return;
    const x = index == null ? null : this.plot.data[0][index];
    for (const line of this.lines) {
      if (line.strong) continue;
      const place = x == null ? line.x.length - 1 : nearest(line.x, x);
      if (place < 0) continue;
      parts.push(h("span", {}, (line.label || this.lines.length > 1) && h("i", { class: line.held ? "dot held" : "dot", color: line.stroke }), line.label, h("b", {}, style.value(line.y[place]))));
    }
    if (x != null) parts.unshift(h("span", {}, `${t(view.axis)} ${AXIS_STYLES[view.axis].value(x)}`));
    fill(this.readout, parts.length > 13 ? [...parts.slice(0, 12), h("span", {}, `+${parts.length - 12}`)] : parts);
  }
  remove() { this.plot?.destroy(); this.place.remove(); }
}
function nearest(x, value) {
  let low = 0, high = x.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (x[middle] < value) low = middle; else high = middle; }
  return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
}
function drawCharts(shown, curves, marks) {
  const present = new Set(shown.flatMap((run) => Object.keys(curves[run.name]?.curves || {})));
  const wanted = [...FIRST.filter((name) => present.has(name)), ...[...present].filter((name) => !FIRST.includes(name) && name !== "loss" && name !== "valid_loss").sort()].slice(0, 40);
  if (!present.has("loss") && !present.has("valid_loss")) { for (const chart of charts.values()) chart.remove(); charts.clear(); fill($("loss"), h("div", { class: "panel empty" }, t("no_records"))); }
  else if (!charts.has("loss")) { const place = h("div", { class: "panel" }); fill($("loss"), place); charts.set("loss", new Chart(place, ["loss", "valid_loss"], { height: 320, title: t("loss"), marks, log: true })); }
  for (const [name, chart] of charts) if (name !== "loss" && !wanted.includes(name)) { chart.remove(); charts.delete(name); }
  for (const name of wanted) if (!charts.has(name)) { const place = h("div", { class: "panel", "data-chart": name }); charts.set(name, new Chart(place, [name], { height: 168, title: metricName(name), log: name === "grad_norm" || name === "perplexity" || name === "lr" })); }
  const order = wanted.map((name) => charts.get(name).place);
  if (order.some((place, index) => $("charts").children[index] !== place)) fill($("charts"), order);
  for (const chart of charts.values()) chart.draw(shown, curves);
}
function forgetCharts() { for (const chart of charts.values()) chart.remove(); charts.clear(); }

"use strict";
// Ranks as rows of one picture: how long each was busy over the run, and a step now in phases. One rank or thousands.
const ranksView = { data: null, stragglers: [] };
const LABELS = 84;
function decodeFloats(text) {
  const binary = atob(text), raw = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) raw[i] = binary.charCodeAt(i);
  return new Float32Array(raw.buffer);
}
const middle = (values) => { const sorted = Float32Array.from(values).sort(); return sorted.length ? sorted[sorted.length >> 1] : 0; };
// Which ranks are in which row: several per row if there are more than fit.
function rowsOf(count, hosts) {
  const perRow = Math.max(1, Math.ceil(count / 512)), height = Math.max(1, Math.min(20, Math.floor(560 / Math.ceil(count / perRow))));
  const rows = []; let y = 0, last = null;
  for (let first = 0; first < count; first += perRow) {
    const host = hosts[first];
    if (host !== last && last !== null && height > 3) y += 6;
    rows.push({ first, end: Math.min(count, first + perRow), y, host, opens: host !== last }); last = host; y += height;
  }
  return { rows, height, perRow, total: y };
}
const ratioColor = (ratio) => {
  if (!(ratio > 0)) return null;
  const dark = isDark(), base = dark ? [38, 66, 74] : [214, 228, 230], cool = dark ? [44, 84, 120] : [186, 208, 232], warm = dark ? [214, 150, 60] : [238, 184, 96], hot = dark ? [232, 98, 84] : [200, 56, 42];
  const mix = (a, b, w) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * Math.max(0, Math.min(1, w)))).join(",")})`;
  return ratio <= 1 ? mix(base, cool, (1 - ratio) * 2.5) : ratio < 1.3 ? mix(base, warm, (ratio - 1) / 0.3) : mix(warm, hot, (ratio - 1.3) / 0.9);
};
function labelRows(g, layout, count, slow) {
  g.font = `11px ${css("--font")}`; g.textBaseline = "middle"; g.textAlign = "right";
  const severalHosts = new Set(layout.rows.map((row) => row.host)).size > 1; let last = -99;
  for (const row of layout.rows) {
    const marked = slow.has(row.first) || (layout.perRow > 1 && [...Array(row.end - row.first).keys()].some((i) => slow.has(row.first + i)));
    if (marked) { g.fillStyle = css("--bad"); g.fillRect(LABELS - 6, row.y - (layout.height < 4 ? 2 : 0), 4, Math.max(5, layout.height - 1)); }
    const text = layout.height >= 11 ? `${t("rank")} ${row.first}` : severalHosts && row.opens ? String(row.host ?? "").slice(0, 14) : row.first % 64 === 0 ? `${t("rank")} ${row.first}` : null;
    if (text && row.y - last >= 11) { g.fillStyle = css(marked && layout.height >= 11 ? "--bad" : "--muted"); g.fillText(text, LABELS - 10, row.y + Math.max(layout.height / 2, 5), LABELS - 12); last = row.y; }
  }
}
function drawRanks() {
  const all = ranksView.data, body = $("ranks-body"), hint = $("ranks-hint");
  if (!all || !all.count) { hint.textContent = ""; fill(body, h("div", { class: "panel empty" }, t("no_ranks"))); return; }
  const now = all.seconds[0].length, hosts = all.hosts.map(String), hostCount = new Set(hosts).size;
  hint.textContent = `${countRanks(now)}${hostCount > 1 ? ` · ${whole(hostCount)} ${t("hosts_n")}` : ""} · ${t("step")} ${whole(all.step)}`;
  const slow = new Map(all.slow.map((each) => [each.rank, each.times]));
  for (const each of ranksView.stragglers) if (isNumber(each.rank)) slow.set(each.rank, each.times_median ?? slow.get(each.rank));
  const layout = rowsOf(all.ranks, hosts), heat = h("canvas", { id: "rank-heat", role: "img" }), lanes = h("canvas", { id: "rank-lanes", role: "img" });
  fill(body, h("div", { class: "panel" },
    h("div", { class: "rank-grid" }, h("div", {}, h("h3", {}, t("busy_over_time")), h("div", {}, heat)), h("div", {}, h("h3", {}, t("last_step")), h("div", {}, lanes))),
    phaseLegend(all), slowList(slow, hosts), layout.perRow > 1 && h("p", { class: "hint more" }, `${layout.perRow} ${t("per_row")}`)));
  drawHeat(heat, all, layout, slow); drawLanes(lanes, all, layout, slow, now);
}
function phaseLegend(all) {
  const sums = all.seconds.map((row) => row.reduce((a, b) => a + b, 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
  const ramp = [0.8, 1, 1.15, 1.3, 1.8].map((ratio) => h("i", { class: "swatch", color: ratioColor(ratio) }));
  return h("div", { class: "legend" }, h("span", {}, t("faster"), ramp, t("slower")),
    all.phases.map((name, index) => h("span", {}, h("i", { class: "swatch", color: phaseColor(name, index) }), known(name) ? t(name) : name, h("b", {}, percent(sums[index] / total)))));
}
function slowList(slow, hosts) {
  const sorted = [...slow].sort((a, b) => b[1] - a[1]);
  if (!sorted.length) return null;
  return h("div", { class: "slow", id: "slow-ranks" }, h("span", { class: "hint" }, t("slow_ranks")), sorted.slice(0, 12).map(([rank, times]) => h("span", { class: "chip" }, `${t("rank")} ${rank}${hosts[rank] ? ` · ${hosts[rank]}` : ""} `, h("b", {}, isNumber(times) ? `${times.toFixed(2)} ${t("median")}` : ""))), sorted.length > 12 && h("span", { class: "hint" }, `+${sorted.length - 12} ${t("and_more")}`));
}
function drawHeat(canvas, all, layout, slow) {
  const [g, width] = canvasOf(canvas, layout.total + 20), busy = decodeFloats(all.busy), columns = all.steps.length, typical = middle(busy.filter((value) => value > 0)) || 1;
  const space = width - LABELS, x = (column) => LABELS + (space * column) / columns, gap = layout.height > 4 ? 1 : 0;
  const worst = (column, row) => { let most = NaN; for (let rank = row.first; rank < row.end; rank++) { const value = busy[column * all.ranks + rank]; if (value > 0 && !(value <= most)) most = value; } return most; };
  for (const row of layout.rows) for (let column = 0; column < columns; column++) {
    const color = ratioColor(worst(column, row) / typical);
    if (color) { g.fillStyle = color; const left = x(column); g.fillRect(left, row.y, Math.max(1, x(column + 1) - left + (columns > 80 ? 0.5 : -0.5)), layout.height - gap); }
  }
  labelRows(g, layout, all.ranks, slow);
  g.fillStyle = css("--muted"); g.textBaseline = "alphabetic"; g.textAlign = "left"; g.fillText(`${t("step")} ${whole(all.steps[0])}`, LABELS, layout.total + 15); g.textAlign = "right"; if (columns > 1) g.fillText(whole(all.steps[columns - 1]), width, layout.total + 15);
  canvas.setAttribute("aria-label", t("busy_over_time"));
  hover(canvas, layout, (row, position) => { const column = Math.floor(((position - LABELS) / space) * columns); if (column < 0 || column >= columns) return null; const value = worst(column, row); return `${rowName(row, all.hosts)}\n${t("step")} ${whole(all.steps[column])}\n${t("busy")} ${duration(value)} · ${(value / typical).toFixed(2)} ${t("median")}`; });
}
function drawLanes(canvas, all, layout, slow, now) {
  const narrow = getComputedStyle(canvas.closest(".rank-grid")).gridTemplateColumns.split(" ").length === 1, left = narrow ? LABELS : 0;
  const [g, width] = canvasOf(canvas, layout.total + 20), total = (rank) => all.seconds.reduce((sum, phase) => sum + (phase[rank] || 0), 0), own = (rank) => all.seconds.reduce((sum, phase, i) => sum + (all.phases[i] === "wait" ? 0 : phase[rank] || 0), 0);
  let longest = 0; for (let rank = 0; rank < now; rank++) longest = Math.max(longest, total(rank));
  const space = width - left - 2, gap = layout.height > 4 ? 2 : 0, shown = (row) => { let best = row.first; for (let rank = row.first; rank < Math.min(now, row.end); rank++) if (own(rank) > own(best)) best = rank; return best; };
  for (const row of layout.rows) {
    if (row.first >= now) continue;
    const rank = shown(row); let x = left;
    all.phases.forEach((name, index) => { const part = (space * (all.seconds[index][rank] || 0)) / (longest || 1); g.fillStyle = phaseColor(name, index); g.fillRect(x, row.y, part, layout.height - gap); x += part; });
  }
  if (narrow) labelRows(g, layout, all.ranks, slow);
  g.font = `11px ${css("--font")}`; g.fillStyle = css("--muted"); g.textBaseline = "alphabetic"; g.textAlign = "left"; g.fillText("0", left, layout.total + 15); g.textAlign = "right"; g.fillText(duration(longest), width, layout.total + 15);
  canvas.setAttribute("aria-label", t("last_step"));
  hover(canvas, layout, (row) => { if (row.first >= now) return null; const rank = shown(row); return [rowName({ first: rank, end: rank + 1 }, all.hosts), ...all.phases.map((name, i) => `${known(name) ? t(name) : name}  ${duration(all.seconds[i][rank])}`)].join("\n"); });
}
const rowName = (row, hosts) => `${t("rank")} ${row.first}${row.end - row.first > 1 ? `–${row.end - 1}` : ""}${hosts[row.first] ? ` · ${hosts[row.first]}` : ""}`;
function hover(canvas, layout, tell) {
  canvas.addEventListener("mousemove", (event) => { const y = event.offsetY, row = layout.rows.find((each) => y >= each.y && y < each.y + layout.height), text = row && tell(row, event.offsetX); if (text) tip.show(event, text); else tip.hide(); });
  canvas.addEventListener("mouseleave", tip.hide);
}

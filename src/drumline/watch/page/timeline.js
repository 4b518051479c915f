"use strict";
// What happened when, where the time went, and what the model wrote.
const KINDS = { restart: "bad", failed: "bad", fault: "bad", "save failed": "bad", "replica drift": "bad", "not finite": "bad", rollback: "warn", "loss spike": "warn", skipped: "warn", straggler: "warn", stalled: "warn", "snapshots off": "warn", "computed again": "warn", stopped: "warn", finished: "good", "straggler over": "good" };
const SAVES = ["saved", "snapshot"], STARTS = ["started", "resumed"];
const kindOf = (name) => (Object.hasOwn(KINDS, name) ? KINDS[name] : "");
const GOOD = { useful: ["#3d8f68", "#58b387"], startup: ["#7d93b8", "#8ba3cc"], again: ["#d39a3c", "#dba951"], down: ["#c4564a", "#e07a6e"], evaluation: ["#8d79b8", "#a594d1"], stalls: ["#a9a398", "#7b838a"] };
const goodColor = (name) => GOOD[name][isDark() ? 1 : 0];
const eventView = { chosen: "" };
function drawTimeline(run) {
  const body = $("timeline-body"), events = withEvaluations(run);
  const line = h("canvas", { id: "time-line", role: "img", "aria-label": t("timeline") });
  const timed = events.some((event) => isNumber(event.at));
  fill(body, h("div", { class: "stack" }, goodPanel(run.goodput), h("div", { class: "panel" }, timed && h("div", {}, line), eventList(run, events))));
  if (timed) drawLine(line, run, events);
}
// An evaluation is a record of metrics.jsonl, and on the time line an event as any other.
function withEvaluations(run) { return [...run.events, ...(run.evaluations || [])].sort((a, b) => (a.at ?? 0) - (b.at ?? 0)); }
function goodPanel(good) {
  if (!good) return h("div", { class: "panel empty" }, t("no_times"));
  const total = good.total || 1, names = Object.keys(GOOD);
  return h("div", { class: "panel", id: "goodput" },
    h("div", { class: "good-head" }, h("b", {}, percent(good.parts.useful / total)), h("span", {}, `${t("was_useful")} · ${duration(good.total)} ${t("in_total")}${good.attempts > 1 ? ` · ${good.attempts} ${t("starts")}` : ""}`)),
    h("div", { class: "good-bar" }, names.filter((name) => good.parts[name] > 0).map((name) => h("div", { color: goodColor(name), width: `${(100 * good.parts[name]) / total}%`, title: `${t(name)} ${duration(good.parts[name])}` }))),
    h("div", { class: "legend" }, names.map((name) => h("span", {}, h("i", { class: "swatch", color: goodColor(name) }), t(name), h("b", {}, duration(good.parts[name])), percent(good.parts[name] / total)))));
}
function drawLine(canvas, run, events) {
  const lanes = ["lane_run", "lane_eval", "lane_save", "lane_trouble"], rowHeight = 22, labels = 72;
  const [g, width] = canvasOf(canvas, lanes.length * rowHeight + 24), timed = events.filter((event) => isNumber(event.at));
  const start = Math.min(...timed.map((event) => event.at)), last = Math.max(...timed.map((event) => event.at), ["running", "restarting"].includes(run.state) && !embedded ? Date.now() / 1000 : 0), span = Math.max(1, last - start);
  const x = (at) => labels + ((width - labels - 8) * (at - start)) / span;
  g.font = `11px ${css("--font")}`; g.textBaseline = "middle"; g.fillStyle = css("--muted");
  lanes.forEach((name, row) => { g.textAlign = "left"; g.fillText(t(name), 0, row * rowHeight + rowHeight / 2); g.fillStyle = css("--grid"); g.fillRect(labels, row * rowHeight + rowHeight / 2, width - labels, 1); g.fillStyle = css("--muted"); });
  let open = null; const bar = (from, to, bad) => { g.fillStyle = css(bad ? "--bad" : "--accent"); g.globalAlpha = 0.75; g.fillRect(x(from), 6, Math.max(2, x(to) - x(from) - 1), rowHeight - 12); g.globalAlpha = 1; };
  let sign = start; if (!timed.some((event) => event.event === "started")) open = start;
  for (const event of timed) {
    if (event.event === "started" && open !== null) { bar(open, sign); open = null; }
    if (STARTS.includes(event.event) && open === null) open = event.at;
    if (["restart", "finished", "stopped", "failed"].includes(event.event) && open !== null) { bar(open, event.at, false); open = null; }
    sign = event.at;
  }
  if (open !== null) bar(open, ["running", "restarting"].includes(run.state) ? last : sign);
  const marks = timed.map((event) => ({ event, x: x(event.at), row: laneOf(event.event) })).filter((mark) => mark.row >= 0);
  for (const mark of marks) { const color = mark.row === 3 ? css(kindOf(mark.event.event) === "bad" ? "--bad" : "--warn") : mark.row === 1 ? goodColor("evaluation") : mark.row === 2 ? css(mark.event.event === "saved" ? "--accent" : "--faint") : css("--ink"); g.fillStyle = color; g.beginPath(); if (mark.row === 2) g.rect(mark.x - 1, mark.row * rowHeight + 5, 2, rowHeight - 10); else g.arc(mark.x, mark.row * rowHeight + rowHeight / 2, 4, 0, 7); g.fill(); }
  g.fillStyle = css("--muted"); g.textBaseline = "alphabetic"; g.textAlign = "left"; g.fillText(clock(start), labels, lanes.length * rowHeight + 16); g.textAlign = "right"; if (width > 460) g.fillText(clock(last), width, lanes.length * rowHeight + 16);
  canvas.onmousemove = (event) => { const row = Math.floor(event.offsetY / rowHeight); let best = null; for (const mark of marks) if (mark.row === row && Math.abs(mark.x - event.offsetX) < (best ? Math.abs(best.x - event.offsetX) : 8)) best = mark; if (best) tip.show(event, `${eventName(best.event.event)}${isNumber(best.event.step) ? ` · ${t("step")} ${whole(best.event.step)}` : ""}\n${clock(best.event.at)}\n${aboutEvent(best.event)}`); else tip.hide(); };
  canvas.onmouseleave = tip.hide;
}
const laneOf = (name) => (STARTS.includes(name) || name === "finished" ? 0 : name === "evaluation" ? 1 : SAVES.includes(name) ? 2 : kindOf(name) && kindOf(name) !== "good" ? 3 : -1);
// The facts of an event in one line.
function aboutEvent(event) {
  const facts = [], take = (name, write) => { if (event[name] != null) facts.push(write(event[name])); };
  if (event.event === "restart") { const cause = event.cause || {}; if (event.what) facts.push(String(event.what)); else if (cause.what) facts.push(`${t("rank")} ${cause.rank} · ${cause.host}: ${cause.kind ?? ""} ${cause.what}`); }
  if (event.old_world_size && event.world_size && event.old_world_size !== event.world_size) facts.push(`${event.old_world_size} → ${event.world_size} ${t("world")}`); else take("world_size", (v) => (isNumber(v) ? countRanks(v) : String(v)));
  take("from", (v) => String(v)); take("bytes", bytes); take("stall_s", (v) => `${t("stall")} ${duration(v)}`);
  if (event.event === "rollback") facts.push(`→ ${t("step")} ${event.to}`);
  if (event.event === "straggler") facts.push(`${t("rank")} ${event.rank} · ${event.host ?? ""}${isNumber(event.times_median) ? ` · ${event.times_median.toFixed(2)} ${t("median")}` : ""}`);
  if (event.event === "evaluation") take("valid_loss", (v) => `${t("held_out")} ${precise(v)}`);
  const told = new Set(["event", "time", "at", "number", "step", "cause", "stacks", "world_size", "old_world_size", "from", "bytes", "stall_s", "hosts", "versions", "valid_loss", "pid", ...(event.event === "restart" ? ["what"] : []), ...(event.event === "rollback" ? ["to"] : []), ...(event.event === "straggler" ? ["rank", "host", "times_median"] : [])]);
  for (const [name, value] of Object.entries(event)) if (!told.has(name) && value != null && value !== "") facts.push(`${name} ${typeof value === "object" ? JSON.stringify(value).slice(0, 200) : isNumber(value) ? +value.toPrecision(6) : String(value).slice(0, 300)}`);
  if (event.event !== "restart" && event.cause) facts.push(typeof event.cause === "string" ? event.cause : event.cause.what || JSON.stringify(event.cause).slice(0, 200));
  return facts.join(" · ");
}
function stacksOf(event) {
  const cause = event.cause && typeof event.cause === "object" ? event.cause : {};
  return [event.stacks, cause.place, cause.trace, ...(Array.isArray(cause.others) ? cause.others : [])].filter(Boolean).map(String).join("\n\n");
}
function eventList(run, events) {
  if (!events.length) return h("div", { class: "empty" }, t("no_events"));
  const counts = new Map(); for (const [name, total] of Object.entries(run.event_totals)) counts.set(name, total.count);
  if (run.evaluations?.length) counts.set("evaluation", run.latest.evaluations);
  const chip = (name, label) => h("button", { type: "button", class: "chip", "aria-pressed": String(eventView.chosen === name), onclick: () => { eventView.chosen = name; drawTimeline(run); } }, label);
  const quiet = new Set(["snapshot", "saved", "evaluation"]);
  const wanted = events.filter((event) => (eventView.chosen ? event.event === eventView.chosen : eventView.chosen === "" && (!quiet.has(event.event) || events.length <= 12))).reverse();
  const sum = eventView.chosen && run.event_totals[eventView.chosen];
  return h("div", { class: "more" },
    h("div", { class: "chips" }, chip("", t("all_events")), [...counts].map(([name, count]) => chip(name, `${eventName(name)} ${whole(count)}`))),
    sum && (sum.bytes > 0 || sum.stall_s > 0) && h("p", { class: "hint" }, `${whole(sum.count)} · ${bytes(sum.bytes)} · ${t("stall")} ${duration(sum.stall_s)}`),
    h("ul", { class: "events", id: "events" }, (wanted.length ? wanted : events.slice(-12).reverse()).slice(0, 400).map(eventLine)));
}
function eventLine(event) {
  const stacks = stacksOf(event), about = aboutEvent(event);
  return h("li", {}, h("time", {}, isNumber(event.at) ? clock(event.at) : String(event.time ?? "")), h("span", { class: "step" }, isNumber(event.step) ? `${t("step")} ${whole(event.step)}` : isNumber(event.cause?.step) ? `${t("step")} ${whole(event.cause.step)}` : ""),
    h("div", { class: `what ${kindOf(event.event)}` }, h("b", {}, eventName(event.event)), about && ` · ${about}`, stacks && h("details", {}, h("summary", {}, t("stacks")), h("pre", {}, stacks))));
}
const sampleView = { all: false };
function drawSamples(run) {
  const samples = [...run.samples].reverse();
  if (!samples.length) { fill($("samples-body"), h("div", { class: "panel empty" }, t("no_samples"))); return; }
  fill($("samples-body"), (sampleView.all ? samples : samples.slice(0, 3)).map((sample) => h("article", { class: "panel sample" }, h("header", {}, h("b", {}, `${t("step")} ${whole(sample.step)}`), isNumber(sample.time) && h("span", {}, clock(sample.time))), h("pre", {}, h("span", { class: "prompt" }, sample.prompt), sample.text))),
    samples.length > 3 && !sampleView.all && h("button", { type: "button", class: "chip more", onclick: () => { sampleView.all = true; drawSamples(run); } }, `${t("show_all")} ${samples.length}`));
}

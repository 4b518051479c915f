"use strict";
// What is chosen, and what is drawn when it changes.
const app = { runs: [], shown: [], curves: {}, details: {}, stop: () => {}, state: "on" };
app.main = () => app.shown[0];

// Colours and language.
const themes = ["system", "light", "dark"];
let theme = themes.includes(memory.get("theme")) ? memory.get("theme") : "system";
const systemDark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() { document.documentElement.dataset.theme = theme === "system" ? (systemDark.matches ? "dark" : "light") : theme; $("theme").textContent = t(theme); $("theme").title = t("theme_hint"); }
function applyLanguage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  $("language").textContent = t("language");
}
function redrawAll() { applyLanguage(); applyTheme(); forgetCharts(); app.draw(); }
$("theme").onclick = () => { theme = themes[(themes.indexOf(theme) + 1) % 3]; memory.set("theme", theme); redrawAll(); };
$("language").onclick = () => { language = language === "zh" ? "en" : "zh"; memory.set("language", language); redrawAll(); };
systemDark.addEventListener("change", () => { if (theme === "system") redrawAll(); });

// Which runs are shown stands in the address, so that a link shows the same.
const asked = new URLSearchParams(location.search).getAll("run");
function rememberShown() { if (embedded) return; const query = new URLSearchParams([...(new URLSearchParams(location.search).has("token") ? [["token", new URLSearchParams(location.search).get("token")]] : []), ...app.shown.map((run) => ["run", run.name])]); history.replaceState(null, "", `?${query}${location.hash}`); }

app.zoom = (range) => { view.range = range; drawControls(); app.redraw(); clearTimeout(app.zooming); app.zooming = setTimeout(app.loadCurves, 150); };
app.loadCurves = async () => {
  const { axis, range } = view;
  const margin = range ? (range[1] - range[0]) * 0.02 : 0, part = range && !embedded ? { low: range[0] - margin, high: range[1] + margin } : {};
  const loaded = await Promise.all(app.shown.map((run) => orNull(data.curves(run.name, { axis, ...part }))));
  if (axis !== view.axis || range !== view.range) return;
  app.curves = {};
  loaded.forEach((each) => { if (each) app.curves[each.run] = each; });
  const axes = app.curves[app.main()?.name]?.axes;
  if (axes && !axes.includes(view.axis) && !range) { view.axis = "step"; return app.loadCurves(); }
  drawControls(); app.redraw(); app.listen();
};
const orNull = (promise) => promise.catch(() => null); // the run has gone, or the server; the next event says so
app.loadRun = async (name) => {
  const run = await orNull(data.run(name));
  if (!run) return;
  app.details[name] = run;
  if (name === app.main()?.name) drawRun(run);
  const known = app.runs.find((each) => each.run === name);
  if (known) { Object.assign(known, { state: run.state, step: run.step, total_steps: run.total_steps }); drawRuns(); }
  drawDifferences(app.shown, app.details); app.redraw();
};
app.loadRanks = async () => {
  const run = app.main(), loaded = run && (await orNull(data.ranks(run.name)));
  if (loaded && run === app.main()) { ranksView.data = loaded; drawRanks(); }
};
app.loadRuns = async () => { app.runs = await data.runs(); const names = app.runs.map((each) => each.run); const before = app.shown.length; app.shown = app.shown.filter((run) => names.includes(run.name)); if (!app.shown.length && names.length) await app.show([newestRun()]); else { drawRuns(); if (!names.length || before !== app.shown.length) app.draw(); } };
function newestRun() { const busy = app.runs.filter((each) => each.state === "running" || each.state === "restarting"); const pool = busy.length ? busy : app.runs; return pool.reduce((best, each) => (String(each.updated ?? "") >= String(best.updated ?? "") ? each : best)).run; }
app.show = async (names) => {
  const used = new Map(app.shown.map((run) => [run.name, run.color]));
  app.shown = []; for (const name of names) { let color = used.get(name) ?? 0; while (app.shown.some((run) => run.color === color)) color++; app.shown.push({ name, color }); }
  if (app.shown.length === 1) app.shown[0].color = 0;
  view.range = null; ranksView.data = null; rememberShown(); drawRuns(); forgetCharts();
  await Promise.all([app.loadCurves(), ...names.map(app.loadRun), app.loadRanks()]);
};
// At most one picture per frame, however much arrives.
app.redraw = () => { if (app.pending) return; app.pending = requestAnimationFrame(() => { app.pending = 0; drawCharts(app.shown, app.curves, marks); drawTiles(); }); };
app.draw = () => { drawRuns(); drawControls(); const run = app.details[app.main()?.name]; if (run) drawRun(run); else drawNothing(); drawRanks(); drawDifferences(app.shown, app.details); app.redraw(); };

app.listen = () => {
  app.stop(); clearTimeout(app.again);
  if (embedded) { setLive("report"); return; }
  if (document.hidden) { setLive("paused"); return; }
  const at = Object.fromEntries(app.shown.map((run) => [run.name, app.curves[run.name]?.at]));
  app.stop = data.listen(app.shown.map((run) => run.name), view.axis, at, (what, message) => {
    if (what === "open") setLive("live", "on");
    else if (what === "error") { app.stop(); setLive("lost_page", "off"); app.again = setTimeout(() => app.loadRuns().then(app.loadCurves, app.listen), 1500); }
    else if (what === "curves") app.append(message);
    else if (what === "run") later("run " + message.run, () => app.loadRun(message.run), 500);
    else if (what === "ranks" && message.run === app.main()?.name) later("ranks", app.loadRanks, 1000);
    else if (what === "runs") later("runs", app.loadRuns, 500);
  });
};
const waiting = new Map();
function later(key, work, ms) { if (!waiting.has(key)) waiting.set(key, setTimeout(() => { waiting.delete(key); work(); }, ms)); }
app.append = ({ run, tail }) => {
  const mine = app.curves[run];
  if (!mine || !tail || tail.axis !== view.axis || String(tail.from) !== String(mine.at)) { later("curves", app.loadCurves, 400); return; }
  mine.at = tail.at; mine.added = (mine.added || 0);
  for (const [name, points] of Object.entries(tail.curves)) {
    const curve = (mine.curves[name] ||= { x: [], y: [], mx: [], my: [] });
    if (curve.mx === curve.x) { curve.mx = [...curve.x]; curve.my = [...curve.y]; }
    for (let i = 0; i < points.x.length; i++) { curve.x.push(points.x[i]); curve.y.push(points.y[i]); curve.mx.push(points.x[i]); curve.my.push(points.y[i]); }
    mine.added += points.x.length;
  }
  if (app.details[run]) app.details[run].latest = tail.latest;
  const mainStep = tail.latest.step, known = app.runs.find((each) => each.run === run);
  if (isNumber(mainStep)) { if (app.details[run]) app.details[run].step = Math.max(app.details[run].step, mainStep); if (known) known.step = Math.max(known.step, mainStep); }
  if (mine.added > 6000) { mine.added = 0; later("curves", app.loadCurves, 400); }
  app.redraw();
};
document.addEventListener("visibilitychange", () => { if (document.hidden) { app.stop(); setLive("paused"); } else if (!embedded) app.loadRuns().then(app.loadCurves, app.listen); });
setInterval(() => { const run = app.main(); if (run && !embedded && !document.hidden && ["running", "restarting"].includes(app.details[run.name]?.state)) app.loadRun(run.name); }, 10000);
function setLive(word, kind = "") { const left = app.curves[app.main()?.name]?.left_bytes; $("live").className = `live ${kind}`; $("live").textContent = left > 4e6 ? `${t("reading")} (${bytes(left)})` : t(word); app.state = word; }

// Vertical lines in the curve of the loss.
const MARKS = ["restart", "rollback", "resumed", "loss spike", "not finite", "failed"];
function marks() {
  if (app.shown.length !== 1 || view.axis === "time") return [];
  const run = app.details[app.main().name], steps = (run?.events || []).filter((event) => MARKS.includes(event.event)).map((event) => ({ step: isNumber(event.step) ? event.step : event.cause?.step, bad: kindOf(event.event) === "bad" })).filter((mark) => isNumber(mark.step)).slice(-200);
  if (view.axis === "step") return steps.map((mark) => ({ x: mark.step, bad: mark.bad }));
  const each = run.latest.step ? run.latest.tokens / run.latest.step : NaN;
  return isNumber(each) ? steps.map((mark) => ({ x: mark.step * each, bad: mark.bad })) : [];
}
function drawControls() {
  const axes = app.curves[app.main()?.name]?.axes || ["step"];
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing, "aria-label": t("smoothing"), id: "smoothing" });
  slider.oninput = () => { view.smoothing = Number(slider.value); memory.set("smoothing", slider.value); app.redraw(); };
  if (document.activeElement?.id === "smoothing") return;
  fill($("controls"),
    view.range && h("button", { type: "button", id: "reset", onclick: () => app.zoom(null) }, t("reset")),
    h("label", {}, t("smoothing"), slider),
    h("button", { type: "button", id: "log", "aria-pressed": String(view.log), onclick: () => { view.log = !view.log; memory.set("log", view.log ? "1" : "0"); drawControls(); forgetCharts(); app.redraw(); } }, t("log")),
    h("div", { class: "segments", id: "axes" }, ["step", "tokens", "time"].map((axis) => h("button", { type: "button", "data-axis": axis, disabled: !axes.includes(axis), "aria-pressed": String(view.axis === axis), onclick: () => { view.axis = axis; memory.set("axis", axis); view.range = null; drawControls(); app.loadCurves(); } }, t(axis)))));
}
function drawRuns() {
  const place = $("runs"); place.hidden = app.runs.length < 2;
  if (place.hidden) return;
  const wasOpen = place.querySelector("details")?.open ?? innerWidth > 1000, names = app.shown.map((run) => run.name);
  const scrolled = place.querySelector(".list")?.scrollTop;
  fill(place, h("details", wasOpen ? { open: true } : {}, h("summary", {}, `${t("runs")} (${app.runs.length})`), h("div", { class: "list" }, [...app.runs].reverse().map((run) => {
    const shown = app.shown.find((each) => each.name === run.run);
    const box = h("input", { type: "checkbox", "aria-label": run.run, checked: Boolean(shown) });
    box.onclick = (event) => { event.stopPropagation(); const next = box.checked ? [...names, run.run] : names.filter((name) => name !== run.run); if (next.length) app.show(next); else event.preventDefault(); };
    return h("div", { class: `run${shown ? " on" : ""}`, onclick: () => app.show([run.run]) }, box, h("div", {}, h("div", { class: "run-name" }, run.run, " ", shown && app.shown.length > 1 && h("i", { class: "dot", color: colorOf(shown.color) })), h("div", { class: "run-about" }, `${t("state_" + run.state)} · ${whole(run.step)}${run.total_steps ? ` / ${whole(run.total_steps)}` : ""}`)));
  }))));
  if (scrolled) place.querySelector(".list").scrollTop = scrolled;
}
function drawRun(run) {
  document.title = `${run.run} · drumline`;
  fill($("head"), h("h1", {}, run.run), h("span", { class: `state ${["running", "restarting", "finished", "failed", "lost", "stopped"].includes(run.state) ? run.state : ""}` }, known("state_" + run.state) ? t("state_" + run.state) : run.state), h("span", { class: "path" }, aboutLine(run)));
  ranksView.stragglers = run.stragglers;
  drawTimeline(run); drawSamples(run); drawAbout(run); drawTiles();
}
function aboutLine(run) {
  const model = run.config?.model || {}, parameters = run.model?.parts?.reduce((sum, row) => sum + row.parameters, 0), ranks = run.started?.world_size;
  return [model.preset, parameters && `${short(parameters)} ${t("parameters")}`, run.data?.source, isNumber(ranks) && countRanks(ranks), run.started?.gpu || run.started?.device].filter(Boolean).join(" · ") || run.path;
}
function drawNothing() {
  for (const id of ["tiles", "timeline-body", "samples-body", "about-body", "loss", "charts", "ranks-body"]) fill($(id));
  fill($("head"), h("p", { class: "empty", id: "nothing" }, app.runs.length ? "" : t("no_runs"))); for (const id of ["curves", "ranks", "timeline", "samples", "about", "tiles"]) $(id).hidden = !app.runs.length;
}
function drawTiles() {
  const run = app.details[app.main()?.name];
  if (!run) return;
  for (const id of ["curves", "ranks", "timeline", "samples", "about", "tiles"]) $(id).hidden = false;
  const last = run.latest, tile = (id, name, value, note, more) => h("div", { class: "tile", id: `tile-${id}` }, h("div", { class: "name" }, name), h("div", { class: "value" }, value), note != null && h("div", { class: "note", title: note }, note), more);
  const share = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0, moving = ["running", "restarting"].includes(run.state);
  const speed = last.tokens_per_s ?? last.samples_per_s, good = run.goodput;
  fill($("tiles"),
    tile("step", t("progress"), whole(run.step), null, [h("div", { class: "note" }, `${run.total_steps ? `${t("of")} ${whole(run.total_steps)}` : ""}${moving && isNumber(last.eta_s) ? ` · ${duration(last.eta_s)} ${t("eta")}` : ""}`), h("div", { class: "progress" }, h("div", { width: `${share * 100}%` }))]),
    tile("loss", t("loss"), isNumber(last.loss) ? last.loss.toFixed(4) : "–", isNumber(last.epoch) ? `epoch ${last.epoch.toFixed(2)}` : ""),
    tile("valid", t("valid_loss"), isNumber(last.valid_loss) ? last.valid_loss.toFixed(4) : "–", isNumber(last.valid_loss) ? `${t("best")} ${last.best_valid_loss.toFixed(4)}` : t("no_evaluation")),
    tile("speed", last.tokens_per_s == null && last.samples_per_s != null ? t("samples_speed") : t("speed"), isNumber(speed) ? short(speed) : "–", isNumber(last.tokens) ? `${short(last.tokens)} ${t("tokens")}` : ""),
    isNumber(last.mfu) && tile("mfu", "MFU", percent(last.mfu), ""),
    isNumber(last.peak_memory_bytes) && tile("memory", t("memory"), bytes(last.peak_memory_bytes), ""),
    good && tile("goodput", t("goodput"), percent(good.parts.useful / (good.total || 1)), duration(good.total)));
}
function drawFoot() { fill($("foot"), embedded ? `${t("made")} ${embedded.version} · ${clock(embedded.made)}` : t("from_files")); }
let resizing = 0, lastWidth = innerWidth;
window.addEventListener("resize", () => { if (innerWidth === lastWidth) return; lastWidth = innerWidth; cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => { app.draw(); }); });
(async () => {
  applyLanguage(); applyTheme(); drawFoot();
  try { app.runs = await data.runs(); } catch { app.runs = []; }
  const names = app.runs.map((each) => each.run), wanted = asked.filter((name) => names.includes(name));
  if (names.length) await app.show(wanted.length ? wanted : [newestRun()]); else { app.draw(); app.listen(); }
  document.documentElement.dataset.ready = "1";
})();

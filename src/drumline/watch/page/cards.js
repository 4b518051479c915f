"use strict";
// What the run is: config, environment, data, model, and how to make it again.
const pairs = (rows) => h("dl", {}, rows.filter(([, value]) => value != null && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
const card = (title, ...inside) => h("div", { class: "panel" }, h("h3", {}, title), ...inside);
const settingText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
function drawAbout(run) {
  fill($("about-body"), h("div", { class: "cards" }, runCard(run), environmentCard(run), modelCard(run.model), dataCard(run.data), tasksCard(run.tasks), againCard(run), configCard(run.config)));
}
function runCard(run) {
  const started = run.started || {}, hosts = Array.isArray(started.hosts) ? [...new Set(started.hosts.map(String))] : [];
  const cause = typeof run.cause === "string" ? run.cause : run.cause?.what;
  return card(t("run"), pairs([[t("folder"), run.path], [t("state"), t("state_" + run.state)], [t("progress"), `${whole(run.step)} ${t("of")} ${whole(run.total_steps)}`], [t("started"), clock(run.events[0]?.at)], [t("updated"), run.updated], [t("cause"), cause], [t("weights_sha256"), run.weights_sha256 && h("span", { class: "mono" }, run.weights_sha256)], [t("hosts"), hosts.length > 8 ? `${hosts.slice(0, 8).join(", ")} +${hosts.length - 8}` : hosts.join(", ")]]));
}
function environmentCard(run) {
  const started = run.started || {}, versions = started.versions && typeof started.versions === "object" ? started.versions : run.versions;
  return card(t("environment"), pairs([[t("device"), [started.gpu || started.gpu_name, started.device].filter(Boolean).join(" · ")], [t("world_size"), started.world_size], ...Object.entries(versions || {}).map(([name, value]) => [name, String(value)])]));
}
function modelCard(model) {
  if (!model?.parts) return card(t("model_card"), h("p", { class: "empty" }, t("no_checkpoint")));
  const total = { part: t("total") }, names = ["parameters", "weights", "gradients", "optimizer"];
  for (const name of names) total[name] = model.parts.reduce((sum, row) => sum + row[name], 0);
  const line = (row) => h("tr", {}, h("td", {}, row.part), names.map((name) => h("td", { class: "number" }, name === "parameters" ? whole(row[name]) : bytes(row[name]))));
  return card(t("model_card"), h("p", { class: "hint" }, `${short(total.parameters)} ${t("parameters")}${model.layers ? ` · ${model.layers} ${t("layers")}` : ""} · ${bytes(total.weights + total.gradients + total.optimizer)}`),
    h("div", { class: "scroll" }, h("table", { id: "model-parts" }, h("thead", {}, h("tr", {}, h("th", {}, t("part")), names.map((name) => h("th", { class: "number" }, t(name))))), h("tbody", {}, model.parts.slice(0, 40).map(line), line(total)))));
}
function dataCard(about) {
  if (!Object.keys(about || {}).length) return card(t("data_card"), h("p", { class: "empty" }, t("no_data")));
  const splits = about.splits || {}, split = (name) => splits[name] && `${whole(splits[name].tokens)} ${t("tokens")} · ${whole(splits[name].documents)} ${t("documents")}`;
  return card(t("data_card"), pairs([[t("source"), about.source && String(about.source_key || about.source)], [t("training_split"), split("train") || (isNumber(about.tokens) && `${whole(about.tokens)} ${t("tokens")}`)], [t("valid_split"), split("valid")], [t("vocabulary"), isNumber(about.vocab_size) && whole(about.vocab_size)], [t("text"), isNumber(about.text_bytes) && bytes(about.text_bytes)], [t("folder"), about.folder], [t("sha256"), about.sha256 && h("span", { class: "mono" }, String(about.sha256))]].map(([name, value]) => [name, value || null])),
    about.folder && !about.splits && h("p", { class: "hint more" }, t("gone")),
    (about.excerpts || []).map((each) => h("div", { class: "excerpt" }, h("div", { class: "sub" }, each.name), h("pre", {}, each.text))));
}
function tasksCard(tasks) {
  const rows = (tasks || []).flatMap((file) => Object.entries(file.results?.tasks || {}).flatMap(([task, result]) => Object.entries(result?.metrics || {}).filter(([name]) => !name.endsWith("_stderr")).map(([name, value]) => [file.results.step, task, name, value, result.items])));
  if (!rows.length) return null;
  return card(t("tasks"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "number" }, t("step")), h("th", {}, t("task")), h("th", {}, t("metric")), h("th", { class: "number" }, t("value")), h("th", { class: "number" }, t("items")))), h("tbody", {}, rows.slice(0, 60).map((row) => h("tr", {}, h("td", { class: "number" }, whole(row[0])), h("td", {}, String(row[1])), h("td", {}, row[2]), h("td", { class: "number" }, precise(row[3])), h("td", { class: "number" }, whole(row[4]))))))));
}
function againCard(run) {
  if (!run.config || !run.config.model) return null;
  const versions = run.started?.versions || run.versions || {}, command = `drumline train --config ${quoted(run.path + "/config.toml")} --run_dir ${quoted("runs/" + run.run + "-again")}`;
  return card(t("make_again"), h("pre", { class: "code", id: "command" }, command), h("div", { class: "more" }, pairs([["drumline", versions.drumline && String(versions.drumline)], ["torch", versions.torch && String(versions.torch)], [`${t("data")} sha256`, run.data.sha256 && h("span", { class: "mono" }, String(run.data.sha256))]])));
}
function configCard(config) {
  const sections = Object.entries(config || {}).filter(([, settings]) => Object.keys(settings).length);
  const box = card(t("config"), sections.length ? h("div", { class: "config" }, sections.map(([name, settings]) => h("div", {}, h("h3", {}, name), h("dl", {}, Object.entries(settings).flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, settingText(value))]))))) : h("p", { class: "empty" }, t("no_config")));
  box.classList.add("wide"); return box;
}
// Settings that are not the same in all runs that are shown.
function drawDifferences(shown, details) {
  const place = $("differences"), configs = shown.map((run) => details[run.name]?.config).filter(Boolean);
  place.hidden = shown.length < 2 || configs.length < shown.length;
  if (place.hidden) return;
  const flat = configs.map((config) => Object.assign({}, ...Object.values(config))), names = [...new Set(flat.flatMap(Object.keys))].filter((name) => name !== "run_dir" && new Set(flat.map((each) => JSON.stringify(each[name]))).size > 1);
  const head = h("tr", {}, h("th", {}, ""), shown.map((run) => h("th", {}, h("i", { class: "dot", color: colorOf(run.color) }), " ", run.name)));
  fill(place, h("div", { class: "panel" }, h("h3", {}, t("differences")), names.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, names.map((name) => h("tr", {}, h("td", {}, name), flat.map((each) => h("td", { class: name in each ? "" : "same" }, name in each ? settingText(each[name]) : "–"))))))) : h("p", { class: "hint more" }, t("no_differences"))));
}

"use strict";
// Where data come from: the server that sent this page, or, in a report, the page itself.
const embedded = (() => { const element = $("embedded"); return element ? JSON.parse(element.textContent) : null; })();
async function ask(path, parameters) {
  const query = new URLSearchParams(parameters).toString();
  const response = await fetch(`/api/${path}${query ? "?" + query : ""}`);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}
const data = embedded ? {
  runs: async () => embedded.runs,
  run: async () => embedded.run,
  ranks: async () => embedded.ranks,
  curves: async (run, { axis }) => embedded.curves[axis] || embedded.curves.step,
  listen: () => () => {},
} : {
  runs: () => ask("runs"),
  run: (run) => ask("run", { run }),
  ranks: (run) => ask("ranks", { run }),
  curves: (run, view) => ask("curves", { run, ...view }),
  // Calls back with what is new. A page that nobody sees does not listen: a browser has few connections for one server.
  listen(runs, axis, at, on) {
    const query = new URLSearchParams([["axis", axis], ...runs.map((run) => ["run", run]), ...runs.map((run) => ["at", (at[run] || []).join(",")])]);
    const stream = new EventSource(`/api/stream?${query}`);
    for (const name of ["curves", "ranks", "run", "runs"]) stream.addEventListener(name, (event) => on(name, JSON.parse(event.data)));
    stream.onopen = () => on("open"); stream.onerror = () => on("error");
    return () => stream.close();
  },
};

// Starts the page: creates the store and the views, and keeps them up to date.

import { forgetWindows, getJson, getPast, getWindow, watch } from "./data.js";
import { showDetails } from "./details.js";
import { $, segments } from "./dom.js";
import { downloadJson, downloadPicture } from "./download.js";
import { Experts, ORDERS } from "./experts.js";
import { showFindings } from "./findings.js";
import { count } from "./format.js";
import { showInstances } from "./instances.js";
import { listenToKeys } from "./keys.js";
import { Matrix } from "./matrix.js";
import { showPickers } from "./pickers.js";
import { hangs, members, showPresent } from "./present.js";
import { METRICS, SCALES, shown } from "./shown.js";
import { Store } from "./store.js";
import { startTheme } from "./theme.js";
import { TimeBar } from "./timebar.js";
import { SERIES, Timeline } from "./timeline.js";

const REFRESH_MS = 1000; // between two requests while a log grows

const store = new Store({
  overview: null, // api/overview
  version: -1, // of the overview
  at: null, // a window number, or "all"
  data: null, // WindowData of `at`
  all: null, // WindowData of all windows together
  past: null, // PastData, once it is asked for
  shown: null, // what the matrix paints: shown.js
  metric: "wait",
  scale: "ratio",
  series: "awaited",
  zoom: null,
  pick: null, // {i, j}, {rank} or null
  side: "column", // of a picked link: whose course is shown
  finding: -1,
  follow: false,
  layer: 0,
  expertOrder: "number",
  theme: "dark",
});

const toggleTheme = startTheme(store);
segments($("metric"), METRICS, store, "metric");
segments($("scale"), SCALES, store, "scale");
segments($("series"), SERIES, store, "series");
segments($("expert-order"), ORDERS, store, "expertOrder");
new Matrix(store);
new Timeline(store);
new Experts(store);
showFindings(store);
showDetails(store);
showPickers(store);
showPresent(store);
showInstances();
listenToKeys(store, new TimeBar(store), toggleTheme);
for (const form of ["png", "svg"]) $(form).addEventListener("click", () => store.get("shown") && downloadPicture(store, form));
$("json").addEventListener("click", () => store.get("shown") && downloadJson(store));

store.on("data all past metric scale theme", () => store.set({ shown: shown(store) ?? store.get("shown") }));
store.on("at", loadWindow);

store.on("scale version", loadPast);

async function loadPast() {
  if (store.get("scale") !== "then" || !store.get("data")) return;
  try {
    store.set({ past: await getPast() });
  } catch (error) {
    banner(`What was usual before cannot be read: ${error.message}`);
  }
}

let wanted = 0;

async function loadWindow({ fresh = false } = {}) {
  const at = store.get("at");
  if (at === null) return;
  const mine = ++wanted;
  try {
    const data = await getWindow(at, { fresh });
    if (mine === wanted) store.set({ data });
  } catch (error) {
    banner(`This window cannot be read: ${error.message}`);
  }
}

let [busy, again, refreshed] = [false, false, 0];

async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, refreshed + REFRESH_MS - performance.now())));
    refreshed = performance.now();
    await update(await getJson("api/overview"));
  } catch (error) {
    banner(`The figures cannot be read: ${error.message}`);
  }
  busy = false;
  if (again) {
    again = false;
    refresh();
  }
}

async function update(overview) {
  const numbers = overview.windows.window;
  const before = store.get("overview");
  const [newest, at] = [numbers.at(-1), store.get("at")];
  const changes = { overview, version: overview.version };
  if (before && before.run !== overview.run) {
    forgetWindows();
    Object.assign(changes, { at: newest ?? null, finding: -1, pick: null, zoom: null });
  }
  if (numbers.length) {
    const all = await getWindow("all", { fresh: true });
    changes.all = all;
    if (at === "all") changes.data = all;
    if (!before) Object.assign(changes, { follow: overview.live, at: overview.live ? newest : "all" });
    else if (store.get("follow") || at === null || (at !== "all" && !numbers.includes(at))) changes.at = newest;
  }
  store.set(changes);
  // Lines of late ranks may still come for the newest window.
  if (numbers.length && at === newest && changes.at === undefined) loadWindow({ fresh: true });
  showState(overview);
}

function showState(overview) {
  const { name, num_ranks: ranks, progress, live, run, num_runs: runs } = overview;
  const nodes = new Set(overview.node_of_rank).size;
  const reading = progress < 1 ? ` · reading ${Math.floor(100 * progress)} %` : "";
  $("source").textContent = name;
  $("source").title = name;
  const view = members(overview);
  $("status").textContent = `${count(ranks, "rank")}${nodes > 1 ? ` on ${count(nodes, "node")}` : ""}${runs > 1 ? ` · run ${run} of ${runs}` : ""}${view ? ` · ${view}` : ""}${reading}`;
  $("status").title = $("status").textContent;
  $("follow").title = live ? "Follow the newest window (l)" : "Nothing has been written for a while; follow anyway (l)";
  document.title = `${overview.findings?.findings.length || ""} ${name} – eprt diagnose`.trim();
  document.body.classList.toggle("alone", ranks === 1); // no matrix: there is nobody to wait for
  const empty = overview.windows.window.length === 0;
  $("empty").hidden = !empty;
  $("empty").textContent = "No window yet.\nOne closes every few seconds while requests run.";
  banner(trouble());
}

function trouble() {
  const text = store.get("overview")?.trouble;
  return [hangs(store.get("overview")), text ? `Nothing newer: ${text}` : ""].filter(Boolean).join(" ");
}

function banner(text) {
  $("banner").textContent = text;
  $("banner").hidden = !text;
  document.documentElement.style.setProperty("--banner", `${$("banner").offsetHeight}px`);
}

document.addEventListener("stale", refresh); // after a change of the reader's own
watch(
  (state) => state.version !== store.get("version") && refresh(),
  (linked) => banner(linked ? trouble() : "The page has lost its server; it keeps trying."),
);

// From the window and the chosen measure to what the matrix shows: values, ratios, margins and their colours.

import { amountScale, colours, ratioScale } from "./colour.js";
import { margins, median, ratios, ratiosTo } from "./usual.js";

export const METRICS = [
  ["wait", "Wait", "Dispatch and combine together (1)"],
  ["dispatch", "Dispatch", "Waiting for tokens to arrive (2)"],
  ["combine", "Combine", "Waiting for experts' outputs (3)"],
  ["tokens", "Load", "Tokens received (4)"],
];
export const SCALES = [
  ["ratio", "× usual now", "Coloured by how a link differs from others of its kind, now (u)"],
  ["then", "× usual then", "Coloured by how a link differs from what it was before (u)"],
  ["amount", "Amount", "Coloured by microseconds or tokens (u)"],
];

export const TITLES = {
  wait: "Wait per call",
  dispatch: "Dispatch wait per call",
  combine: "Combine wait per call",
  tokens: "Tokens per call",
};

function ownCounts(metric) {
  return metric === "tokens"; // a rank keeps tokens for itself, but does not wait for itself
}

const derived = new WeakMap(); // WindowData or PastData -> metric -> {ratios, margins}

export function derive(data, metric, nodes) {
  if (!derived.has(data)) derived.set(data, {});
  const own = ownCounts(metric);
  return (derived.get(data)[metric] ??= {
    ratios: ratios(data[metric], data.n, nodes, own),
    margins: margins(data[metric], data.n, own),
  });
}

// Against the others now, or against what was usual then, as the reader has chosen.
export function ratiosOf(store, data, metric) {
  const past = store.get("scale") === "then" ? store.get("past") : null;
  if (past?.n === data.n) return ratiosTo(data[metric], past[metric]);
  return derive(data, metric, store.get("overview").node_of_rank).ratios;
}

// The scale comes from all windows together, so that a colour means the same in every window.
function makeScale(kind, metric, all, allRatios) {
  if (kind === "amount") {
    const values = all[metric].filter((_, k) => ownCounts(metric) || k % (all.n + 1) !== 0);
    return amountScale(values);
  }
  const known = allRatios.filter(Number.isFinite).sort();
  const most = known.length ? known[Math.floor(0.999 * (known.length - 1))] : 1;
  return ratioScale(most > 6);
}

// What each rank's average is compared with: {rows, columns}.
function usualMargins({ rows, columns }, past, metric, nodes) {
  if (past) return derive(past, metric, nodes).margins;
  return { rows: rows.map(() => median(rows)), columns: columns.map(() => median(columns)) };
}

export function shown(store) {
  const [data, all, metric, kind, past] = ["data", "all", "metric", "scale", "past"].map((name) => store.get(name));
  if (!data || !all || (kind === "then" && past?.n !== data.n)) return null;
  const nodes = store.get("overview").node_of_rank;
  const ownMargins = derive(data, metric, nodes).margins;
  const ratioValues = ratiosOf(store, data, metric);
  const allRatios = data === all ? ratioValues : ratiosOf(store, all, metric);
  return {
    n: data.n,
    nodes,
    metric,
    kind,
    own: ownCounts(metric),
    values: data[metric],
    ratios: ratioValues,
    margins: ownMargins,
    usualMargins: usualMargins(ownMargins, kind === "then" ? past : null, metric, nodes),
    painted: kind === "amount" ? data[metric] : ratioValues,
    scale: makeScale(kind, metric, all, allRatios),
    colours: colours(kind === "amount" ? "amount" : "ratio", store.get("theme")),
  };
}

// What the matrix shows, in words.
export function caption(store) {
  const { metric, kind } = store.get("shown");
  const what = metric === "tokens" ? "row received from column" : "row waited for column";
  if (kind !== "then") return what;
  const past = store.get("past");
  const known = past[metric].some(Number.isFinite);
  return known ? `${what}; then is ${past.source}` : `${what}; ${past.source} has no tokens of single links`;
}

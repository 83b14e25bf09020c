// From the window and the chosen measure to what the matrix shows: values, ratios, margins and their colours.

import { amountScale, colours, ratioScale } from "./colour.js";
import { margins, ratios } from "./usual.js";

export const METRICS = [
  ["wait", "Wait", "Dispatch and combine together (1)"],
  ["dispatch", "Dispatch", "Waiting for tokens to arrive (2)"],
  ["combine", "Combine", "Waiting for experts' outputs (3)"],
  ["tokens", "Load", "Tokens received (4)"],
];
export const SCALES = [
  ["ratio", "× usual", "Coloured by how a link differs from others of its kind (u)"],
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

const derived = new WeakMap(); // WindowData -> metric -> {ratios, margins}

export function derive(data, metric, nodes) {
  if (!derived.has(data)) derived.set(data, {});
  const own = ownCounts(metric);
  return (derived.get(data)[metric] ??= {
    ratios: ratios(data[metric], data.n, nodes, own),
    margins: margins(data[metric], data.n, own),
  });
}

// The scale comes from all windows together, so that a colour means the same in every window.
function makeScale(kind, metric, all, nodes) {
  if (kind === "amount") {
    const values = all[metric].filter((_, k) => ownCounts(metric) || k % (all.n + 1) !== 0);
    return amountScale(values);
  }
  const known = derive(all, metric, nodes).ratios.filter(Number.isFinite).sort();
  const most = known.length ? known[Math.floor(0.999 * (known.length - 1))] : 1;
  return ratioScale(most > 6);
}

export function shown(store) {
  const [data, all, metric, kind] = ["data", "all", "metric", "scale"].map((name) => store.get(name));
  if (!data || !all) return null;
  const nodes = store.get("overview").node_of_rank;
  const { ratios: ratioValues, margins: marginValues } = derive(data, metric, nodes);
  return {
    n: data.n,
    nodes,
    metric,
    own: ownCounts(metric),
    values: data[metric],
    ratios: ratioValues,
    margins: marginValues,
    painted: kind === "ratio" ? ratioValues : data[metric],
    scale: makeScale(kind, metric, all, nodes),
    colours: colours(kind, store.get("theme")),
  };
}

// Details of the picked rank or link: its figures now, and its course over all windows.

import { getJson } from "./data.js";
import { $, element, figures, shape } from "./dom.js";
import { digits, micros, tendency, times } from "./format.js";
import { derive, ratiosOf } from "./shown.js";
import { median, usualOf } from "./usual.js";

const CHARTS = [
  ["awaited", "Others wait for it", micros],
  ["waits", "It waits for others", micros],
  ["compute", "Compute", micros],
  ["tokens", "Tokens received", digits],
];

const LINK_CHARTS = [
  ["wait", "This link's wait", micros],
  ["tokens", "Tokens across it", digits],
];

let asked = 0;

export function showDetails(store) {
  store.on("pick data side version theme scale past", async () => {
    const [pick, data, overview] = [store.get("pick"), store.get("data"), store.get("overview")];
    const body = $("details-body");
    if (!data || !pick || !overview) {
      body.replaceChildren(...(data && overview ? summary(store, data, overview) : []));
      return;
    }
    const link = pick.i !== undefined && pick.i !== pick.j;
    const rank = pick.rank ?? (link && store.get("side") === "row" ? pick.i : pick.j);
    const mine = ++asked;
    let course, across;
    try {
      [course, across] = await Promise.all([getJson(`api/ranks/${rank}`), link ? getJson(`api/links/${pick.i}-${pick.j}`) : null]);
    } catch (error) {
      console.warn(error);
      return;
    }
    if (mine !== asked) return;
    const nodes = overview.node_of_rank;
    const head = link ? linkHead(store, pick, data, nodes, across) : [element("h3", {}, `Rank ${rank}`), element("p", { class: "where" }, `node ${nodes[rank]}`)];
    const charts = CHARTS.map(([series, name, figure]) => chart(course, series, name, figure, store.get("at")));
    body.replaceChildren(...head, ...charts);
  });
}

// With nothing picked: a few figures of all ranks, and the ranks with the largest values.
function summary(store, data, { node_of_rank: nodes, num_ranks: ranks }) {
  const { margins } = derive(data, "wait", nodes);
  const usual = usualOf(data.wait, data.n, nodes, false);
  const tokens = usualOf(data.tokens, data.n, nodes, true);
  const extreme = (values, name) => {
    const rank = values.reduce((best, value, k) => (value > (values[best] ?? -1) ? k : best), -1);
    if (rank < 0) return null;
    const ratio = values[rank] / median(values);
    const pick = () => store.set({ pick: { rank }, finding: -1 });
    return [element("button", { type: "button", onclick: pick }, `${name}: rank ${rank}`), micros(values[rank]), times(ratio), tendency(ratio)];
  };
  const between = new Set(nodes).size > 1;
  return [
    element("h3", {}, "All ranks"),
    element("p", { class: "where" }, "Choose a cell, a rank or a finding."),
    figures([
      [between ? "Usual wait within nodes" : "Usual wait", micros(usual.inside)],
      ...(between ? [["Usual wait between nodes", micros(usual.between)]] : []),
      ["Usual compute", micros(median(data.compute))],
      ["Usual tokens per pair", digits(median([tokens.inside, tokens.between]))],
    ]),
    ...(ranks > 1
      ? [figures([extreme(margins.columns, "Most awaited"), extreme(margins.rows, "Waits most"), extreme(data.compute, "Computes most")].filter(Boolean))]
      : []),
  ];
}

function linkHead(store, { i, j }, data, nodes, across) {
  const k = i * data.n + j;
  const back = j * data.n + i;
  const row = (name, metric, figure) => {
    const ratio = ratiosOf(store, data, metric)[k];
    return [name, figure(data[metric][k]), times(ratio), tendency(ratio)];
  };
  const chip = (side, rank) =>
    element(
      "button",
      { type: "button", "aria-pressed": String(store.get("side") === side), onclick: () => store.set({ side }) },
      `Rank ${rank}`,
    );
  return [
    element("h3", {}, `Rank ${i} waits for rank ${j}`),
    element("p", { class: "where" }, nodes[i] === nodes[j] ? `within node ${nodes[i]}` : `node ${nodes[i]} from node ${nodes[j]}`),
    figures([
      row("Wait", "wait", micros),
      row("Dispatch", "dispatch", micros),
      row("Combine", "combine", micros),
      row("Tokens", "tokens", digits),
      ["Opposite direction", micros(data.wait[back]), times(ratiosOf(store, data, "wait")[back])],
    ]),
    ...LINK_CHARTS.map(([series, name, figure]) => chart(across, series, name, figure, store.get("at"))),
    element("div", { class: "chips", role: "group", "aria-label": "Rank whose course is shown" }, chip("column", j), chip("row", i)),
  ];
}

function chart(course, series, name, figure, at) {
  const [own, usual] = [course.series[series], course.usual[series]].map((values) => values.map((v) => v ?? NaN));
  const now = at === "all" ? -1 : course.first.findIndex((first, k) => first <= at && at <= course.last[k]);
  const value = now >= 0 ? own[now] : median(own);
  const base = now >= 0 ? usual[now] : median(usual);
  const ratio = value / base;
  return element(
    "div",
    { class: "chart" },
    element(
      "div",
      { class: "chart-head" },
      element("span", {}, name),
      element("b", {}, figure(value), element("small", { class: tendency(ratio) }, times(ratio))),
    ),
    lines(own, usual, now),
  );
}

function lines(own, usual, now) {
  const [width, height] = [280, 44];
  const high = Math.max(...own.filter(Number.isFinite), ...usual.filter(Number.isFinite), 1e-9) * 1.06;
  const x = (k) => (own.length > 1 ? (k / (own.length - 1)) * width : width / 2);
  const y = (value) => height - (value / high) * (height - 2) - 1;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const fixed = { "vector-effect": "non-scaling-stroke" };
  if (now >= 0) svg.append(shape("line", { class: "now", x1: x(now), x2: x(now), y1: 0, y2: height, ...fixed }));
  svg.append(shape("path", { class: "usual", d: path(usual, x, y), ...fixed }));
  svg.append(shape("path", { class: "own", d: path(own, x, y), ...fixed }));
  return svg;
}

function path(values, x, y) {
  let out = "";
  let drawing = false;
  values.forEach((value, k) => {
    if (Number.isFinite(value)) {
      const alone = !drawing && !Number.isFinite(values[k + 1]);
      out += `${drawing ? "L" : "M"}${x(k).toFixed(2)} ${y(value).toFixed(2)}${alone ? "h0.01" : ""}`;
    }
    drawing = Number.isFinite(value);
  });
  return out;
}

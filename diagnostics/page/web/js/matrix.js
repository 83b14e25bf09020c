// The matrix on the page: painting when something changes, mouse and keys.

import { $, element, figures, fit, tooltip } from "./dom.js";
import { endOf } from "./findings.js";
import { digits, micros, tendency, times } from "./format.js";
import { layOut, paint } from "./heatmap.js";
import { LEGEND_HEIGHT, paintLegend } from "./legend.js";
import { markable, paintMarks } from "./marks.js";
import { caption, TITLES } from "./shown.js";

export class Matrix {
  #store;
  #place = null;
  #hover = null;
  #pointed = null; // what the tooltip describes: {at, event}
  #drag = null;

  constructor(store) {
    this.#store = store;
    const repaint = () => this.#paint();
    new ResizeObserver(repaint).observe($("stage"));
    store.on("shown zoom theme", repaint);
    store.on("pick finding overview at", () => this.#paintMarks());
    store.on("shown", () => this.#pointed && this.#tell()); // the same cell, other figures
    store.on("zoom", () => this.#pointed && this.#leave());
    this.#listen();
  }

  get place() {
    return this.#place;
  }

  #paint() {
    const view = this.#store.get("shown");
    const { width, height } = $("stage").getBoundingClientRect();
    const pen = fit($("cells"), width, height);
    if (!pen || !view) return;
    this.#place = layOut(width, height, pen.ratio, view.n, view.nodes, this.#store.get("zoom"));
    paint(pen, this.#place, view);
    $("cells").dataset.window = this.#store.get("data").number ?? "all"; // what is painted, not what was asked for
    $("matrix-title").textContent = TITLES[view.metric];
    $("matrix-hint").textContent = caption(this.#store);
    $("unzoom").hidden = !this.#store.get("zoom");
    const legend = fit($("legend"), width, LEGEND_HEIGHT);
    if (legend) paintLegend(legend, width, 0, view);
    this.#paintMarks();
  }

  #paintMarks() {
    const { width, height } = $("stage").getBoundingClientRect();
    const pen = fit($("marks"), width, height);
    if (!pen || !this.#place || !this.#store.get("shown")) return;
    const store = this.#store;
    const { findings: report, windows } = store.get("overview");
    const at = store.get("at");
    paintMarks(pen, this.#place, {
      hover: this.#hover && { ...this.#hover, drag: this.#drag?.far ? this.#drag : null },
      pick: store.get("pick"),
      items: markable(report?.findings ?? [], at, endOf(windows, at), store.get("finding")),
    });
  }

  // ---- mouse ----

  #listen() {
    const cells = $("cells");
    cells.addEventListener("pointermove", (event) => this.#move(event));
    cells.addEventListener("pointerleave", () => this.#leave());
    cells.addEventListener("pointerdown", (event) => this.#press(event));
    cells.addEventListener("pointerup", (event) => this.#release(event));
    cells.addEventListener("dblclick", (event) => this.#zoomToNode(event));
    cells.addEventListener("keydown", (event) => this.#key(event));
    cells.addEventListener("blur", () => this.#leave());
    cells.addEventListener("wheel", (event) => event.ctrlKey && (event.preventDefault(), this.#wheel(event)), { passive: false });
    $("unzoom").addEventListener("click", () => this.#store.set({ zoom: null }));
  }

  // {i, j} in the cells, {rank} on a label or bar, null elsewhere.
  #at(event) {
    if (!this.#place) return null;
    const { x, y } = this.#place;
    const ratio = this.#place.ratio;
    const [i, j] = [y.at(event.offsetY * ratio), x.at(event.offsetX * ratio)];
    if (i >= 0 && j >= 0) return { i, j };
    return i >= 0 ? { rank: i } : j >= 0 ? { rank: j } : null;
  }

  #move(event) {
    const at = this.#at(event);
    $("cells").style.cursor = at ? "crosshair" : "default";
    if (this.#drag && at?.i !== undefined) {
      this.#drag.far ||= Math.hypot(event.offsetX - this.#drag.x, event.offsetY - this.#drag.y) > 6;
    }
    this.#hover = at?.i === undefined ? null : at;
    this.#paintMarks();
    this.#pointed = at && !this.#drag?.far ? { at, event } : null;
    this.#tell();
  }

  #tell() {
    if (this.#pointed) tooltip(this.#pointed.event, ...describe(this.#store, this.#pointed.at));
    else tooltip(null);
  }

  #leave() {
    this.#hover = this.#pointed = null;
    tooltip(null);
    this.#paintMarks();
  }

  #press(event) {
    const at = this.#at(event);
    if (event.button !== 0 || at?.i === undefined) return;
    this.#drag = { ...at, x: event.offsetX, y: event.offsetY, far: false };
    $("cells").setPointerCapture(event.pointerId);
  }

  #release(event) {
    const [drag, at] = [this.#drag, this.#at(event)];
    this.#drag = null;
    if (!at) return;
    if (drag?.far && at.i !== undefined) {
      const [r0, r1] = [drag.i, at.i].sort((a, b) => a - b);
      const [c0, c1] = [drag.j, at.j].sort((a, b) => a - b);
      this.#zoom({ r0, r1, c0, c1 });
    } else if (event.button === 0) {
      this.#store.set({ pick: at, finding: -1 });
    }
    this.#paintMarks();
  }

  #zoomToNode(event) {
    const at = this.#at(event);
    if (at?.i === undefined) return;
    if (this.#store.get("zoom")) {
      this.#store.set({ zoom: null });
      return;
    }
    const { nodes } = this.#store.get("shown");
    const span = (rank) => [nodes.indexOf(nodes[rank]), nodes.lastIndexOf(nodes[rank])];
    const [[r0, r1], [c0, c1]] = [span(at.i), span(at.j)];
    this.#zoom({ r0, r1, c0, c1 });
  }

  #wheel(event) {
    const at = this.#at(event);
    if (at?.i !== undefined) this.#step(event.deltaY < 0 ? 0.7 : 1.4, at);
  }

  // ---- zoom and keys ----

  #zoom({ r0, r1, c0, c1 }) {
    const n = this.#store.get("shown").n;
    const least = Math.min(n, 4) - 1; // the closest zoom shows a 4 x 4 block
    const widen = (a, b) => {
      const missing = Math.max(0, least - (b - a));
      const low = Math.max(0, Math.min(a - (missing >> 1), n - 1 - least));
      return [low, Math.min(n - 1, Math.max(b, low + least))];
    };
    [[r0, r1], [c0, c1]] = [widen(r0, r1), widen(c0, c1)];
    const whole = r0 === 0 && c0 === 0 && r1 === n - 1 && c1 === n - 1;
    this.#store.set({ zoom: whole ? null : { r0, r1, c0, c1 } });
  }

  #step(factor, { i, j }) {
    const { n } = this.#store.get("shown");
    const { r0, r1, c0, c1 } = this.#store.get("zoom") ?? { r0: 0, r1: n - 1, c0: 0, c1: n - 1 };
    const resize = (low, high, centre) => {
      const size = Math.min(n, Math.max(4, Math.round((high - low + 1) * factor)));
      const from = Math.round(centre - (centre - low) * (size / (high - low + 1)));
      const start = Math.max(0, Math.min(from, n - size));
      return [start, start + size - 1];
    };
    const [[a, b], [c, d]] = [resize(r0, r1, i), resize(c0, c1, j)];
    this.#zoom({ r0: a, r1: b, c0: c, c1: d });
  }

  #key(event) {
    const view = this.#store.get("shown");
    if (!view || event.ctrlKey || event.metaKey || event.altKey) return;
    const pick = this.#store.get("pick");
    const { i, j } = pick?.i === undefined ? { i: pick?.rank ?? 0, j: pick?.rank ?? 0 } : pick;
    const far = event.shiftKey ? 8 : 1;
    const move = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far] }[event.key];
    if (move) {
      const within = (k) => Math.max(0, Math.min(view.n - 1, k));
      const at = pick?.i === undefined ? { i, j } : { i: within(i + move[0]), j: within(j + move[1]) };
      this.#store.set({ pick: at, finding: -1 });
      this.#follow(at);
      $("readout").textContent = sentence(this.#store, at);
    } else if (event.key === "+" || event.key === "=") this.#step(0.6, { i, j });
    else if (event.key === "-") this.#step(1.7, { i, j });
    else if (event.key === "0") this.#store.set({ zoom: null });
    else return;
    event.preventDefault();
  }

  #follow({ i, j }) {
    const zoom = this.#store.get("zoom");
    if (!zoom) return;
    const shift = (low, high, k) => (k < low ? k - low : k > high ? k - high : 0);
    const [dr, dc] = [shift(zoom.r0, zoom.r1, i), shift(zoom.c0, zoom.c1, j)];
    if (dr || dc) this.#store.set({ zoom: { r0: zoom.r0 + dr, r1: zoom.r1 + dr, c0: zoom.c0 + dc, c1: zoom.c1 + dc } });
  }
}

function sentence(store, { i, j }) {
  const view = store.get("shown");
  const value = view.values[i * view.n + j];
  if (view.metric === "tokens") return `rank ${i} received ${digits(value)} tokens per call from rank ${j}`;
  if (i === j) return `rank ${i}: a rank does not wait for itself`;
  return `rank ${i} waited ${micros(value)} per call for rank ${j}, ${times(view.ratios[i * view.n + j])} the usual${view.kind === "then" ? " then" : ""}`;
}

// The tooltip's text for {i, j} or {rank}.
function describe(store, at) {
  const [view, data] = [store.get("shown"), store.get("data")];
  const { n, nodes } = view;
  const ratio = (r) => [times(r), tendency(r)];
  if (at.rank !== undefined) {
    const { rows, columns } = view.margins;
    const received = view.metric === "tokens";
    const figure = received ? digits : micros;
    return [
      element("h3", {}, `Rank ${at.rank}`),
      figures([
        [received ? "sends, per peer" : "others wait for it", figure(columns[at.rank])],
        [received ? "receives, per peer" : "it waits for others", figure(rows[at.rank])],
        ["compute", micros(data.compute[at.rank])],
      ]),
    ];
  }
  const { i, j } = at;
  const where = nodes[i] === nodes[j] ? `within node ${nodes[i]}` : `node ${nodes[i]} waits for node ${nodes[j]}`;
  const k = i * n + j;
  if (i === j) {
    return [element("h3", {}, `Rank ${i}`), figures([["own tokens", digits(data.tokens[k])], ["compute", micros(data.compute[i])]])];
  }
  const rows = [
    ["dispatch", micros(data.dispatch[k])],
    ["combine", micros(data.combine[k])],
    ["tokens", digits(data.tokens[k])],
  ];
  const chosen = view.metric === "wait" ? ["wait", micros(data.wait[k])] : rows.find(([name]) => name === view.metric);
  const others = rows.filter((row) => row !== chosen);
  return [
    element("h3", {}, `Rank ${i} waits for rank ${j}`),
    element("div", { class: "hint" }, where),
    figures([[...chosen, ...ratio(view.ratios[k])], ...others]),
  ];
}

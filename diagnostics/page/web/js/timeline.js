// All ranks over time: a row per rank, a column per window (or several), against the median rank of each column or what
// was usual then.

import { colours, ratioScale } from "./colour.js";
import { getPacked } from "./data.js";
import { $, css, element, figures, fit, font, tooltip } from "./dom.js";
import { digits, micros, tendency, times } from "./format.js";
import { Axis } from "./grid.js";
import { derive } from "./shown.js";
import { median } from "./usual.js";

export const SERIES = [
  ["awaited", "Awaited", "How long others waited for the rank"],
  ["waits", "Waits", "How long the rank waited for others"],
  ["compute", "Compute", "Time in its experts"],
  ["tokens", "Tokens", "Tokens it received"],
];
const HINTS = {
  awaited: "how long others waited for each rank",
  waits: "how long each rank waited for others",
  compute: "time each rank spent in its experts",
  tokens: "tokens each rank received",
};
const LEFT = 44; // for rank numbers

export class Timeline {
  #store;
  #lines = null; // {first, last, values, usual}
  #rows = null;
  #asked = 0;

  constructor(store) {
    this.#store = store;
    new ResizeObserver(() => this.#paint()).observe($("ranks"));
    store.on("series metric version", () => this.#load());
    store.on("at pick theme scale past", () => this.#paint());
    const canvas = $("timeline");
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => tooltip(null));
    canvas.addEventListener("click", (event) => this.#click(event));
  }

  async #load() {
    const [series, metric] = [this.#store.get("series"), this.#store.get("metric")];
    if (!this.#store.get("overview")) return;
    const part = ["dispatch", "combine"].includes(metric) && ["awaited", "waits"].includes(series);
    const mine = ++this.#asked;
    try {
      const { header, floats } = await getPacked(`api/timeline/${series}${part ? `_${metric}` : ""}`);
      if (mine !== this.#asked) return;
      const n = header.num_ranks;
      const medians = header.first.map((_, c) => median(floats.subarray(c * n, (c + 1) * n)));
      this.#lines = { n, first: header.first, last: header.last, values: floats, medians, series, metric };
      this.#paint();
    } catch (error) {
      console.warn(error);
    }
  }

  #paint() {
    const lines = this.#lines;
    const overview = this.#store.get("overview");
    if (!lines || !overview) return;
    const width = $("ranks").clientWidth - 40;
    const { n, first } = lines;
    const height = Math.max(96, Math.min(n * 22, n > 128 ? 2 * n + 40 : 340)) + 4;
    const pen = fit($("timeline"), width, height);
    const past = this.#past();
    const against = past ? "what was usual then" : "the median rank of the window";
    $("ranks-hint").textContent = `${HINTS[lines.series]}, against ${against}${this.#grouping()}`;
    if (!pen || first.length === 0) return;
    const { ratio } = pen;
    const left = LEFT * ratio;
    const rows = (this.#rows = new Axis(0, n - 1, 0, Math.floor(height * ratio), overview.node_of_rank));
    const slot = (width * ratio - left) / first.length;
    const scale = ratioScale(false);
    const { css: paints } = colours("ratio", this.#store.get("theme"));
    const missing = css("--missing");
    for (let c = 0; c < first.length; c++) {
      const x = Math.round(left + c * slot);
      const w = Math.max(1, Math.round(left + (c + 1) * slot) - x - (slot > 8 * ratio && rows.cell > 5 * ratio ? ratio : 0));
      for (let rank = 0; rank < n; rank++) {
        const index = scale.index(lines.values[c * n + rank] / (past ? past[rank] : lines.medians[c]));
        pen.fillStyle = index < 0 ? missing : paints[index];
        pen.fillRect(x, rows.start(rank), w, rows.end(rank) - rows.start(rank));
      }
    }
    this.#paintOver(pen, rows, left, slot, height);
  }

  // Each rank's usual value then, where the reader compares with that; else null.
  #past() {
    const past = this.#store.get("scale") === "then" ? this.#store.get("past") : null;
    const { series, metric, n } = this.#lines;
    if (past?.n !== n) return null;
    if (series === "compute") return past.compute;
    if (series === "tokens") return past.received;
    const { rows, columns } = derive(past, metric === "tokens" ? "wait" : metric, this.#store.get("overview").node_of_rank).margins;
    return series === "awaited" ? columns : rows;
  }

  #paintOver(pen, rows, left, slot, height) {
    const { ratio } = pen;
    pen.fillStyle = css("--soft");
    pen.font = font(pen, 11, 500);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const rank of rows.labels(16 * ratio)) pen.fillText(rank, left - 11 * ratio, Math.max(7 * ratio, rows.middle(rank)));
    const pick = this.#store.get("pick");
    const picked = pick ? [pick.rank, pick.i, pick.j].filter((rank) => rank !== undefined) : [];
    pen.strokeStyle = css("--mark");
    pen.lineWidth = 1.5 * ratio;
    pen.fillStyle = css("--mark");
    for (const rank of picked) {
      const middle = rows.middle(rank);
      pen.beginPath();
      pen.moveTo(left - ratio, middle);
      pen.lineTo(left - 7 * ratio, middle - 4 * ratio);
      pen.lineTo(left - 7 * ratio, middle + 4 * ratio);
      pen.fill();
      if (rows.cell < 9 * ratio) continue;
      pen.strokeRect(left - ratio, rows.start(rank) - ratio, pen.canvas.width - left, rows.end(rank) - rows.start(rank) + 2 * ratio);
    }
    const column = this.#columnOf(this.#store.get("at"));
    if (column >= 0) {
      pen.strokeStyle = css("--ink");
      pen.lineWidth = ratio;
      pen.strokeRect(left + column * slot - 1.5 * ratio, 0.5 * ratio, slot + 2 * ratio, (height - 1) * ratio);
    }
  }

  #columnOf(at) {
    return at === "all" ? -1 : this.#lines.first.findIndex((first, c) => first <= at && at <= this.#lines.last[c]);
  }

  #grouping() {
    const most = Math.max(0, ...this.#lines.first.map((first, c) => this.#lines.last[c] - first + 1));
    return most > 1 && this.#lines.first.length >= 256 ? `; ${most} windows a column, the largest of them` : "";
  }

  #at(event) {
    const lines = this.#lines;
    const width = $("timeline").clientWidth - LEFT;
    const column = Math.floor(((event.offsetX - LEFT) / width) * (lines?.first.length ?? 0));
    const rank = this.#rows?.at(event.offsetY * (window.devicePixelRatio || 1)) ?? -1;
    return rank < 0 || !lines ? null : { rank, column: column >= 0 && column < lines.first.length ? column : -1 };
  }

  #point(event) {
    const at = this.#at(event);
    if (!at || at.column < 0) {
      tooltip(null);
      return;
    }
    const { n, first, last, values, medians } = this.#lines;
    const value = values[at.column * n + at.rank];
    const ratio = value / (this.#past()?.[at.rank] ?? medians[at.column]);
    const [a, b] = [first[at.column], last[at.column]];
    const series = this.#store.get("series");
    tooltip(
      event,
      element("h3", {}, `Rank ${at.rank}, window${a === b ? ` ${a}` : `s ${a}–${b}`}`),
      figures([[SERIES.find(([name]) => name === series)[1].toLowerCase(), (series === "tokens" ? digits : micros)(value), times(ratio), tendency(ratio)]]),
    );
  }

  #click(event) {
    const at = this.#at(event);
    if (!at) return;
    const changes = { pick: { rank: at.rank }, finding: -1 };
    if (at.column >= 0) Object.assign(changes, { at: this.#lines.last[at.column], follow: false });
    this.#store.set(changes);
  }
}

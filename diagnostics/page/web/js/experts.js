// Experts: the tokens of each expert per layer, the rank that holds it, and the experts that moved.

import { amountScale, colours, Scale } from "./colour.js";
import { getJson } from "./data.js";
import { $, css, element, figures, fit, font, tooltip } from "./dom.js";
import { count, times, whole } from "./format.js";
import { showLayers } from "./pickers.js";

export const ORDERS = [
  ["number", "By number", "Experts in their own order"],
  ["load", "By load", "Each layer's busiest expert first"],
];
const MOST_MOVES_LISTED = 9;

export class Experts {
  #store;
  #document = null;
  #asked = 0;

  constructor(store) {
    this.#store = store;
    store.on("at version", () => this.#fetch());
    store.on("expertOrder layer theme", () => this.#show());
    new ResizeObserver(() => this.#show()).observe($("experts"));
  }

  async #fetch() {
    const at = this.#store.get("at");
    if (!this.#store.get("overview") || at === null) return;
    const mine = ++this.#asked;
    try {
      const document = await getJson(`api/experts/${at === "all" ? "newest" : at}`);
      if (mine !== this.#asked) return;
      this.#document = document;
      this.#show();
    } catch (error) {
      console.warn(error);
    }
  }

  #show() {
    if (!this.#document) return;
    const { experts, notes, migrations } = this.#document;
    const body = $("experts-body");
    $("expert-order").hidden = !experts;
    showLayers(this.#store, $("expert-layer"), experts?.layers ?? []);
    if (!experts) {
      $("experts-hint").textContent = "";
      body.replaceChildren(element("p", {}, notes.join("; ")));
      return;
    }
    const layer = Math.min(this.#store.get("layer"), experts.layers.length - 1);
    const name = experts.layers[layer];
    const skew = `busiest expert of layer ${name} at ${times(peak(experts.load[layer]))} the mean`;
    $("experts-hint").textContent = `${experts.source}, placement epoch ${experts.epoch}, ${skew}`;
    const load = element("canvas", { id: "expert-load", "aria-label": "Tokens per layer and expert" });
    const place = element("canvas", { id: "placement", "aria-label": `Slots of layer ${name}` });
    const moves = latestMoves(migrations.moves, name, this.#store.get("at"));
    const title = element("h3", {}, `Placement of layer ${name}: which rank holds which expert`);
    if (moves.size) title.append(element("small", {}, "frame: moved in this window, corner: before"));
    const pair = element("div", { class: "pair" }, element("div", {}, title, place), this.#moves(migrations));
    body.replaceChildren(element("div", {}, load), pair);
    this.#paintPlacement(place, experts, layer, moves);
    this.#paintLoad(load, experts, layer);
  }

  #paintLoad(canvas, { layers, load }, chosen) {
    const width = $("experts").clientWidth - 40;
    const row = Math.max(9, Math.min(22, 330 / layers.length));
    const pen = fit(canvas, width, row * layers.length);
    if (!pen) return;
    const { ratio } = pen;
    const left = 58 * ratio;
    const scale = new Scale("amount", 0.25, 8); // of the layer's mean
    const { css: paints } = colours("amount", this.#store.get("theme"));
    const orders = load.map((loads) => this.#order(loads));
    pen.font = font(pen, 11, 500);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const step = Math.ceil(15 / row);
    load.forEach((loads, l) => {
      const mean = loads.reduce((a, b) => a + b, 0) / loads.length;
      const slot = (pen.canvas.width - left) / loads.length;
      const y = Math.round(l * row * ratio);
      const h = Math.max(1, Math.round((l + 1) * row * ratio) - y - ratio);
      pen.fillStyle = css(l === chosen ? "--ink" : "--faint");
      if (l % step === 0 || l === chosen) pen.fillText(`layer ${layers[l]}`, left - 10 * ratio, y + h / 2);
      orders[l].forEach((expert, k) => {
        const x = Math.round(left + k * slot);
        pen.fillStyle = mean > 0 ? paints[scale.index(loads[expert] / mean)] : css("--missing");
        pen.fillRect(x, y, Math.max(1, Math.round(left + (k + 1) * slot) - x - (slot > 6 * ratio ? ratio : 0)), h);
      });
      if (l === chosen) {
        pen.strokeStyle = css("--ink");
        pen.lineWidth = ratio;
        pen.strokeRect(left - 0.5 * ratio, y - 0.5 * ratio, pen.canvas.width - left, h + ratio);
      }
    });
    this.#listen(canvas, row, left / ratio, width, orders);
  }

  #listen(canvas, row, left, width, orders) {
    const at = (event) => {
      const l = Math.floor(event.offsetY / row);
      const k = Math.floor(((event.offsetX - left) / (width - left)) * (orders[l]?.length ?? 0));
      return orders[l]?.[k] === undefined ? null : { l, expert: orders[l][k] };
    };
    const { experts } = this.#document;
    const { layers, load } = experts;
    canvas.onclick = (event) => this.#store.set({ layer: Math.max(0, Math.min(layers.length - 1, Math.floor(event.offsetY / row))) });
    canvas.onpointerleave = () => tooltip(null);
    canvas.onpointermove = (event) => {
      const spot = at(event);
      if (!spot) {
        tooltip(null);
        return;
      }
      const loads = load[spot.l];
      const mean = loads.reduce((a, b) => a + b, 0) / loads.length;
      tooltip(
        event,
        element("h3", {}, `Expert ${spot.expert}, layer ${layers[spot.l]}`),
        figures([["tokens", whole(loads[spot.expert]), times(loads[spot.expert] / mean)], ["held by", holders(experts, spot)]]),
      );
    };
  }

  #order(loads) {
    const experts = loads.map((_, expert) => expert);
    return this.#store.get("expertOrder") === "load" ? experts.sort((a, b) => loads[b] - loads[a]) : experts;
  }

  #paintPlacement(canvas, experts, layer, moves) {
    const { rank_of_slot: ranks, expert_of_slot: slots, rows } = experts;
    const n = Math.max(...ranks) + 1;
    const most = Math.max(...Array.from({ length: n }, (_, rank) => ranks.filter((r) => r === rank).length));
    const width = Math.max(200, canvas.parentElement.clientWidth);
    // As many columns of ranks as leave the cells a readable width.
    const cell = Math.max(7, Math.min(52, (width - 44) / most));
    const columns = Math.max(1, Math.min(Math.ceil(n / 8), Math.floor(width / (44 + cell * most))));
    const perColumn = Math.ceil(n / columns);
    const height = cell >= 20 && perColumn <= 24 ? 22 : 14;
    const pen = fit(canvas, width, perColumn * height + 2);
    if (!pen) return;
    const { ratio } = pen;
    const values = rows[layer];
    const scale = amountScale(Float64Array.from(values));
    const { css: paints, ink } = colours("amount", this.#store.get("theme"));
    const next = new Array(n).fill(0);
    const cells = [];
    pen.textBaseline = "middle";
    ranks.forEach((rank, p) => {
      const local = next[rank]++;
      const left = Math.floor(rank / perColumn) * (width / columns) * ratio;
      const y = (rank % perColumn) * height * ratio;
      if (local === 0) {
        pen.font = font(pen, 11, 500);
        pen.fillStyle = css("--faint");
        pen.textAlign = "right";
        pen.fillText(rank, left + 28 * ratio, y + (height / 2) * ratio);
      }
      const box = [left + (36 + local * cell) * ratio, y + ratio, (cell - 1) * ratio, (height - 2) * ratio];
      const index = scale.index(values[p]);
      pen.fillStyle = slots[layer][p] < 0 || index < 0 ? css("--missing") : paints[index];
      pen.fillRect(...box);
      if (cell >= 20 && slots[layer][p] >= 0) {
        pen.font = font(pen, 10.5, 500);
        pen.textAlign = "center";
        pen.fillStyle = index < 0 ? css("--soft") : ink[index];
        pen.fillText(slots[layer][p], box[0] + box[2] / 2, box[1] + box[3] / 2 + ratio / 2);
      }
      const move = moves.get(`${rank} ${local}`);
      if (move) markMove(pen, box, move.window === this.#store.get("at"));
      cells.push({ box: box.map((v) => v / ratio), rank, local, p, move });
    });
    canvas.onpointerleave = () => tooltip(null);
    canvas.onpointermove = (event) => pointAt(event, cells, experts, layer);
  }

  #moves({ total, moves }) {
    const head = element("h3", {}, total ? `${count(total, "slot")} migrated` : "No migration in this log");
    const rows = moves.slice(0, MOST_MOVES_LISTED).map((move) => {
      const go = () => {
        const layer = this.#document.experts.layers.indexOf(move.layer);
        this.#store.set({ at: move.window, follow: false, layer: Math.max(0, layer) });
      };
      const cells = [move.window, move.layer, `${move.rank} / ${move.slot}`, `${slotName(move.before)} → ${slotName(move.after)}`];
      return element(
        "tr",
        { tabindex: "0", onclick: go, onkeydown: (event) => event.key === "Enter" && go() },
        ...cells.map((text) => element("td", {}, String(text))),
      );
    });
    const titles = ["window", "layer", "rank / slot", "expert"].map((text) => element("th", { scope: "col" }, text));
    const table = element("table", { class: "moves" }, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows));
    const more = moves.length > MOST_MOVES_LISTED ? element("p", {}, `and ${total - MOST_MOVES_LISTED} before`) : null;
    return element("div", {}, head, rows.length ? table : "", more ?? "");
  }
}

// What a slot holds: a logical expert, or nothing.
function slotName(expert) {
  return expert < 0 ? "empty" : String(expert);
}

// The last move of each slot of a layer that window `at` has seen: "rank slot" -> move. moves: newest first.
function latestMoves(moves, layer, at) {
  const latest = new Map();
  for (const move of moves) {
    const key = `${move.rank} ${move.slot}`;
    if (move.layer === layer && (at === "all" || move.window <= at) && !latest.has(key)) latest.set(key, move);
  }
  return latest;
}

function markMove(pen, [x, y, width, height], isNew) {
  const { ratio } = pen;
  if (isNew) {
    pen.strokeStyle = css("--mark");
    pen.lineWidth = 2 * ratio;
    pen.strokeRect(x + ratio, y + ratio, width - 2 * ratio, height - 2 * ratio);
    return;
  }
  const side = Math.min(8 * ratio, 0.6 * height, width);
  pen.fillStyle = css("--mark");
  pen.beginPath();
  pen.moveTo(x + width - side, y);
  pen.lineTo(x + width, y);
  pen.lineTo(x + width, y + side);
  pen.fill();
}

function pointAt(event, cells, experts, layer) {
  const spot = cells.find(({ box: [x, y, w, h] }) => event.offsetX >= x && event.offsetX < x + w && event.offsetY >= y && event.offsetY < y + h);
  if (!spot) {
    tooltip(null);
    return;
  }
  const expert = experts.expert_of_slot[layer][spot.p];
  tooltip(
    event,
    element("h3", {}, expert < 0 ? "Empty slot" : `Expert ${expert}`),
    figures([
      ["rank / slot", `${spot.rank} / ${spot.local}`],
      ["tokens", whole(experts.rows[layer][spot.p])],
      ["held by", holders(experts, { l: layer, expert })],
      ...(spot.move ? [["since", `window ${spot.move.window}, ${spot.move.before < 0 ? "empty" : `expert ${spot.move.before}`} before`]] : []),
    ]),
  );
}

function holders(experts, { l, expert }) {
  const ranks = experts.rank_of_slot.filter((_, p) => experts.expert_of_slot[l][p] === expert);
  const names = [...new Set(ranks)];
  return names.length > 6 ? count(names.length, "rank") : `rank ${names.join(", ")}`;
}

function peak(loads) {
  const mean = loads.reduce((a, b) => a + b, 0) / loads.length;
  return mean > 0 ? Math.max(...loads) / mean : NaN;
}


// Draws the hovered cell and the findings over the cells: a layer of its own, redrawn with every mouse move.

import { css, font } from "./dom.js";

const MOST_MARKS = 9; // beside the selected one

// items: [{finding, number, selected}] as markable() gives them.
export function paintMarks(pen, place, { hover, pick, items }) {
  const colour = css("--mark");
  for (const item of items.filter((it) => !it.selected)) paintFinding(pen, place, item, colour);
  if (pick && !items.some((item) => item.selected)) paintPick(pen, place, pick);
  for (const item of items.filter((it) => it.selected)) paintFinding(pen, place, item, colour);
  if (hover) paintHover(pen, place, hover);
}

// Findings that concern the windows from `at` to `end`; at "all", every one.
export function markable(findings, at, end, selected) {
  return findings
    .map((finding, k) => ({ finding, form: formOf(finding), number: k + 1, selected: k === selected }))
    .filter(({ finding }) => at === "all" || (finding.first_window <= end && at <= finding.last_window))
    .filter((item, k) => k < MOST_MARKS || item.selected);
}

// "column", "row", "point", "node", "path", or null: all of it. All wait for a rank that hangs.
function formOf({ kind, rank, src }) {
  if (kind === "node" || kind === "path") return kind;
  if (rank === null) return src === null ? null : "point";
  return kind === "row" ? "row" : "column";
}

function boxOf({ x, y, left, top, side }, { finding: { rank, src, dst }, form }) {
  if (form === null) return null;
  if (form === "column") return x.has(rank) ? [x.start(rank), top, x.end(rank) - x.start(rank), side] : null;
  if (form === "row") return y.has(rank) ? [left, y.start(rank), side, y.end(rank) - y.start(rank)] : null;
  if (!x.has(dst) || !y.has(src)) return null;
  return [x.start(dst), y.start(src), x.end(dst) - x.start(dst), y.end(src) - y.start(src)];
}

// Of a node its columns and its rows, of a path both directions: [x, y, width, height].
function blocksOf({ x, y, left, top, side }, { finding: { nodes }, form }) {
  const [columns, rows] = [x, y].map((axis) => axis.blocks().filter(({ node }) => nodes.includes(node)));
  if (form === "path") return rows.flatMap((row) => columns.filter(({ node }) => node !== row.node).map((column) => [column.start, row.start, column.end - column.start, row.end - row.start]));
  return [...columns.map(({ start, end }) => [start, top, end - start, side]), ...rows.map(({ start, end }) => [left, start, side, end - start])];
}

function paintBlocks(pen, place, item, colour) {
  const { ratio } = place;
  const boxes = blocksOf(place, item);
  for (const [width, style] of [[item.selected ? 5 : 4, css("--ground")], [item.selected ? 2.4 : 1.4, colour]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width * ratio;
    for (const box of boxes) pen.strokeRect(...box);
  }
  for (const [x, y, w] of boxes) paintBadge(pen, x + w, y, item.number, colour, item.selected ? 9.5 : 8);
}

function paintFinding(pen, place, item, colour) {
  if (item.form === "node" || item.form === "path") {
    paintBlocks(pen, place, item, colour);
    return;
  }
  const box = boxOf(place, item);
  if (!box) return;
  const { form } = item;
  const thin = form === "column" ? box[2] : box[3];
  if (form !== "point" && thin < 12 * place.ratio) paintArrows(pen, place, item, box, colour);
  else paintOutline(pen, place, item, box, colour);
}

// An outline around a cell, or around a column or row that is wide enough to stay visible inside it.
function paintOutline(pen, place, { form, number, selected }, box, colour) {
  const { ratio } = place;
  const least = form === "point" ? 13 * ratio : 0; // a ring is seen even around a cell of 2 pixels
  const grow = (length) => Math.max(2 * ratio, (least - length) / 2);
  const [gx, gy] = [grow(box[2]), grow(box[3])];
  const [x, y, w, h] = [box[0] - gx, box[1] - gy, box[2] + 2 * gx, box[3] + 2 * gy];
  const radius = form === "point" && box[2] < 8 * ratio ? w / 2 : 5 * ratio;
  for (const [width, style] of [[selected ? 5 : 4, css("--ground")], [selected ? 2.4 : 1.4, colour]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width * ratio;
    pen.beginPath();
    pen.roundRect(x, y, w, h, radius);
    pen.stroke();
  }
  const spot = {
    column: [x + w / 2, place.top + place.side + 3 * ratio],
    row: [place.left + place.side + 3 * ratio, y + h / 2],
    point: [x + w + (box[2] < 8 * ratio ? 6 * ratio : 0), y - (box[2] < 8 * ratio ? 4 * ratio : 0)],
  }[form];
  paintBadge(pen, ...spot, number, colour, selected ? 9.5 : 8);
}

// Arrows at one end of a column or row that an outline would hide; thin lines beside it when it is selected.
function paintArrows(pen, { left, top, side, ratio }, { form, number, selected }, [x, y, w, h], colour) {
  pen.fillStyle = colour;
  const size = (selected ? 6 : 4.5) * ratio;
  const hair = Math.max(1, Math.round(ratio));
  pen.beginPath();
  if (form === "column") {
    const middle = x + w / 2;
    pen.moveTo(middle, top - ratio);
    pen.lineTo(middle - size, top - ratio - 1.5 * size);
    pen.lineTo(middle + size, top - ratio - 1.5 * size);
    if (selected) for (const beside of [x - 2 * hair, x + w + hair]) pen.rect(beside, top, hair, side);
  } else {
    const middle = y + h / 2;
    pen.moveTo(left - ratio, middle);
    pen.lineTo(left - ratio - 1.5 * size, middle - size);
    pen.lineTo(left - ratio - 1.5 * size, middle + size);
    if (selected) for (const beside of [y - 2 * hair, y + h + hair]) pen.rect(left, beside, side, hair);
  }
  pen.fill();
  const spot = form === "column" ? [x + w / 2, top + side + 3 * ratio] : [left + side + 3 * ratio, y + h / 2];
  paintBadge(pen, ...spot, number, colour, selected ? 9.5 : 8);
}

function paintBadge(pen, x, y, number, colour, radius) {
  const { ratio } = pen;
  pen.beginPath();
  pen.arc(x, y, (radius + 2) * ratio, 0, 7);
  pen.fillStyle = css("--ground");
  pen.fill();
  pen.beginPath();
  pen.arc(x, y, radius * ratio, 0, 7);
  pen.fillStyle = colour;
  pen.fill();
  pen.fillStyle = css("--ground");
  pen.font = font(pen, 10.5, 650);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(number, x, y + 0.5 * ratio);
}

function paintPick(pen, { x, y, left, top, side, ratio }, pick) {
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 1.5 * ratio;
  if (pick.rank !== undefined) {
    pen.globalAlpha = 0.5;
    pen.setLineDash([3 * ratio, 3 * ratio]);
    if (x.has(pick.rank)) pen.strokeRect(x.start(pick.rank), top, x.end(pick.rank) - x.start(pick.rank), side);
    if (y.has(pick.rank)) pen.strokeRect(left, y.start(pick.rank), side, y.end(pick.rank) - y.start(pick.rank));
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    return;
  }
  if (!x.has(pick.j) || !y.has(pick.i)) return;
  const [x0, y0, w, h] = [x.start(pick.j), y.start(pick.i), x.end(pick.j) - x.start(pick.j), y.end(pick.i) - y.start(pick.i)];
  const more = Math.max(0, (7 * ratio - w) / 2);
  pen.beginPath();
  pen.roundRect(x0 - more, y0 - more, w + 2 * more, h + 2 * more, 3 * ratio);
  pen.stroke();
}

function paintHover(pen, place, { i, j, drag }) {
  const { x, y, left, top, side, ratio } = place;
  pen.fillStyle = css("--ink");
  if (drag) {
    const [xs, ys] = [[drag.j, j], [drag.i, i]].map((pair) => [Math.min(...pair), Math.max(...pair)]);
    pen.globalAlpha = 0.14;
    const box = [x.start(xs[0]), y.start(ys[0]), x.end(xs[1]) - x.start(xs[0]), y.end(ys[1]) - y.start(ys[0])];
    pen.fillRect(...box);
    pen.globalAlpha = 0.9;
    pen.strokeStyle = css("--ink");
    pen.lineWidth = ratio;
    pen.strokeRect(...box);
    pen.globalAlpha = 1;
    return;
  }
  // Cross hairs that stop short of the cell, so that the cell stays visible.
  pen.globalAlpha = 0.6;
  const hair = Math.max(1, Math.round(ratio));
  const [cx, cy] = [Math.round(x.middle(j)), Math.round(y.middle(i))];
  const [clearX, clearY] = [Math.max(5 * ratio, x.cell / 2 + ratio), Math.max(5 * ratio, y.cell / 2 + ratio)];
  pen.fillRect(left - 6 * ratio, cy, Math.max(0, cx - clearX - left + 6 * ratio), hair);
  pen.fillRect(cx + clearX, cy, Math.max(0, left + side - cx - clearX), hair);
  pen.fillRect(cx, top - 6 * ratio, hair, Math.max(0, cy - clearY - top + 6 * ratio));
  pen.fillRect(cx, cy + clearY, hair, Math.max(0, top + side - cy - clearY));
  pen.globalAlpha = 1;
}

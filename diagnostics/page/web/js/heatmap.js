// Paints the matrix: cells, labels, and the averages of columns (below) and rows (right). Knows nothing of the mouse.

import { css, font } from "./dom.js";
import { amount, brief, roundMicros, tendency } from "./format.js";
import { Axis } from "./grid.js";

const MARGIN = { left: 54, top: 44, right: 62, bottom: 62 }; // of the cells, in CSS pixels
const BARS = 38;

// Places everything, in device pixels, in a box of CSS pixels. zoom: {r0, r1, c0, c1} or null.
export function layOut(width, height, ratio, n, nodes, zoom, above = 0) {
  const [availableX, availableY] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  let side = Math.floor(Math.min(availableX, availableY) * ratio);
  const { r0, r1, c0, c1 } = zoom ?? { r0: 0, r1: n - 1, c0: 0, c1: n - 1 };
  side = Math.min(side, Math.round(Math.max(r1 - r0, c1 - c0) + 1) * 104 * ratio);
  const left = Math.round((MARGIN.left + (availableX - side / ratio) / 2) * ratio);
  const top = Math.round((above + MARGIN.top + Math.min(24, (availableY - side / ratio) / 2)) * ratio);
  return { x: new Axis(c0, c1, left, side, nodes), y: new Axis(r0, r1, top, side, nodes), side, left, top, ratio };
}

export function paint(pen, place, view) {
  if (place.x.cell < 12 * place.ratio || place.y.cell < 12 * place.ratio) paintPixels(pen, place, view);
  else paintCells(pen, place, view);
  paintLabels(pen, place, view);
  paintBars(pen, place, view);
}

function paintPixels(pen, { x, y, side, left, top }, { n, painted, scale, colours, own }) {
  const image = pen.createImageData(side, side);
  const words = new Uint32Array(image.data.buffer);
  const missing = word(css("--missing"));
  const [columns, rows] = [x.pixels(), y.pixels()];
  const line = new Uint32Array(x.count);
  const ground = word(css("--ground"));
  words.fill(ground);
  for (let py = 0, row = -1; py < side; py++) {
    if (rows[py] < 0) continue;
    const i = y.first + rows[py];
    if (rows[py] !== row) {
      row = rows[py];
      for (let k = 0; k < x.count; k++) {
        const j = x.first + k;
        const index = scale.index(painted[i * n + j]);
        line[k] = i === j && !own ? ground : index < 0 ? missing : colours.words[index];
      }
    }
    for (let px = 0; px < side; px++) if (columns[px] >= 0) words[py * side + px] = line[columns[px]];
  }
  pen.putImageData(image, left, top);
}

const sample = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

// A CSS colour as ImageData stores it.
function word(colour) {
  sample.fillStyle = colour;
  sample.fillRect(0, 0, 1, 1);
  const [r, g, b] = sample.getImageData(0, 0, 1, 1).data;
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

function paintCells(pen, { x, y, ratio }, { n, values, painted, scale, colours, own }) {
  const radius = Math.min(4 * ratio, x.cell * 0.08, y.cell * 0.08);
  const size = Math.min(14, Math.max(10, x.cell / ratio / 4.6));
  const written = x.cell >= 36 * ratio && y.cell >= 18 * ratio;
  pen.font = font(pen, size, 500);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const missing = css("--missing");
  for (let i = y.first; i <= y.last; i++) {
    for (let j = x.first; j <= x.last; j++) {
      if (i === j && !own) {
        paintDot(pen, x.middle(j), y.middle(i), ratio);
        continue;
      }
      const index = scale.index(painted[i * n + j]);
      pen.fillStyle = index < 0 ? missing : colours.css[index];
      pen.beginPath();
      pen.roundRect(x.start(j), y.start(i), x.end(j) - x.start(j), y.end(i) - y.start(i), radius);
      pen.fill();
      if (index < 0) frame(pen, x.start(j), y.start(i), x.end(j), y.end(i));
      if (!written) continue;
      pen.fillStyle = index < 0 ? css("--faint") : colours.ink[index];
      pen.fillText(index < 0 ? "–" : brief(values[i * n + j]), x.middle(j), y.middle(i) + 0.5 * ratio);
    }
  }
}

// No data is no colour of the scale.
function frame(pen, x0, y0, x1, y1) {
  const line = Math.max(1, Math.round(pen.ratio));
  pen.strokeStyle = css("--line");
  pen.lineWidth = line;
  pen.strokeRect(x0 + line / 2, y0 + line / 2, x1 - x0 - line, y1 - y0 - line);
}

function paintDot(pen, x, y, ratio) {
  pen.fillStyle = css("--line");
  pen.beginPath();
  pen.arc(x, y, 2 * ratio, 0, 7);
  pen.fill();
}

function paintLabels(pen, { x, y, left, top, side, ratio }, { nodes }) {
  const several = nodes.some((node) => node !== nodes[0]);
  const [near, far] = [6 * ratio, 25 * ratio];
  pen.fillStyle = css("--soft");
  pen.font = font(pen, 11, 500);
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  for (const rank of x.labels(28 * ratio)) pen.fillText(rank, x.middle(rank), top - near - (several ? 2 * ratio : 0));
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const rank of y.labels(18 * ratio)) pen.fillText(rank, left - near - 2 * ratio, y.middle(rank));
  pen.fillStyle = css("--faint");
  pen.font = font(pen, 11);
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  if (several) {
    const blocks = x.blocks();
    const wide = (blocks[0].end - blocks[0].start) / ratio > 46;
    const step = wide ? 1 : Math.max(1, Math.ceil((24 * ratio) / (side / blocks.length)));
    blocks.forEach((block, k) => {
      if (k % step) return;
      pen.fillText(wide ? `node ${block.node}` : `n${block.node}`, (block.start + block.end) / 2, top - far);
    });
    pen.strokeStyle = css("--line");
    pen.lineWidth = ratio;
    pen.beginPath();
    for (const { start, end } of blocks) {
      pen.moveTo(start, top - far + 5.5 * ratio);
      pen.lineTo(end, top - far + 5.5 * ratio);
    }
    pen.stroke();
  }
}

// Averages, as bars from the cells outwards; those far from the usual stand out. A stroke across a bar is its usual.
function paintBars(pen, { x, y, left, top, side, ratio }, { margins, usualMargins, metric }) {
  const [gap, most] = [9 * ratio, BARS * ratio];
  const bars = (axis, values, usual) => {
    const thick = Math.min(14 * ratio, axis.cell);
    const out = [];
    for (let rank = axis.first; rank <= axis.last; rank++) {
      const at = axis.cell > 16 * ratio ? axis.middle(rank) - thick / 2 : axis.start(rank);
      const next = axis.has(rank + 1) ? axis.start(rank + 1) : axis.end(rank); // thin bars leave no gaps
      const wide = axis.cell > 16 * ratio ? thick : Math.max(1, axis.gap ? axis.end(rank) - at : next - at);
      out.push({ value: values[rank], usual: usual[rank], at, thick: wide, tone: tendency(values[rank] / usual[rank]) });
    }
    return out;
  };
  const [columns, rows] = [bars(x, margins.columns, usualMargins.columns), bars(y, margins.rows, usualMargins.rows)];
  const known = [...columns, ...rows].map(({ value }) => value).filter((value) => value > 0);
  if (known.length === 0) return;
  const high = roundUp(Math.max(...known));
  const paints = { long: css("--warm"), short: css("--cool"), "": css("--faint") };
  const length = (value) => Math.min(1, value / high) * most;
  const across = Math.max(1, Math.round(ratio));
  const paintBar = ({ value, usual, at, thick, tone }, place) => {
    if (!(value > 0)) return;
    pen.fillStyle = paints[tone];
    pen.globalAlpha = tone ? 0.95 : 0.55;
    place(at, thick, 0, Math.max(ratio, length(value)));
    pen.globalAlpha = 1;
    pen.fillStyle = css("--ink");
    if (usual > 0) place(at, thick, length(usual), across);
  };
  for (const bar of columns) paintBar(bar, (at, thick, from, long) => pen.fillRect(at, top + side + gap + from, thick, long));
  for (const bar of rows) paintBar(bar, (at, thick, from, long) => pen.fillRect(left + side + gap + from, at, long, thick));
  paintBarScales(pen, { left, top, side }, gap, most, metric === "tokens" ? amount(high) : roundMicros(high));
}

// From 0 to a round value, beside the first bar of the columns and above the first of the rows.
function paintBarScales(pen, { left, top, side }, gap, most, high) {
  const { ratio } = pen;
  const hair = Math.max(1, Math.round(ratio));
  const [below, beside] = [top + side + gap, left + side + gap];
  pen.fillStyle = css("--faint");
  pen.fillRect(left - 5 * ratio, below, hair, most);
  pen.fillRect(beside, top - 5 * ratio, most, hair);
  for (const at of [0, most - hair]) {
    pen.fillRect(left - 8 * ratio, below + at, 3 * ratio, hair);
    pen.fillRect(beside + at, top - 8 * ratio, hair, 3 * ratio);
  }
  pen.fillStyle = css("--soft");
  pen.font = font(pen, 10.5);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillText("0", left - 11 * ratio, below + 2 * ratio);
  pen.fillText(high, left - 11 * ratio, below + most);
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  pen.fillText("0", beside, top - 12 * ratio);
  pen.fillText(high, beside + most - 4 * ratio, top - 12 * ratio);
}

// The next of 1, 2, 3, 5 times a power of ten.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 3, 5].find((step) => step * power >= value * 0.999) ?? 10) * power;
}

// Paints the strip of time: calls per second and step time as lines, the peak of each window as bars, and the windows of
// findings. Each lane has its scale on the left, from 0 or 1 to a round value.

import { css, font } from "./dom.js";
import { amount } from "./format.js";
import { roundUp } from "./heatmap.js";

export const GUTTER = 92; // CSS pixels, for names and scales
export const MOST_SPANS = 4;
const [SPANS, GAP, HEAD] = [13, 9, 7]; // height of the findings' lines, between lanes, above the first

export function callsPerSecond({ calls, t_start: begins, t_end: ends }, index) {
  const seconds = ends[index] - begins[index];
  return seconds > 0 ? calls[index] / seconds : NaN;
}

// spans: [{finding, k, muted}]. ranks: how many should have reported.
export function paintStrip(pen, { width, height }, { windows, ranks, spans, at, selected }) {
  const { ratio } = pen;
  const numbers = windows.window;
  const calls = numbers.map((_, k) => callsPerSecond(windows, k));
  const steps = (windows.step_ms ?? []).map((step) => step ?? NaN);
  const lanes = [{ name: "calls/s", values: calls, weight: 1 }];
  if (steps.some(Number.isFinite)) lanes.push({ name: "step, ms", values: steps, weight: 1 });
  const peaks = windows.peak.map((peak) => peak ?? NaN);
  lanes.push({ name: "peak, ×", values: peaks, weight: 1.4, isBars: true });
  const room = height - HEAD - SPANS - GAP * (lanes.length - 1);
  const whole = lanes.reduce((sum, { weight }) => sum + weight, 0);
  const slot = ((width - GUTTER) * ratio) / numbers.length;
  const middle = (k) => GUTTER * ratio + (k + 0.5) * slot;
  let top = HEAD;
  for (const lane of lanes) {
    const box = { top: top * ratio, bottom: (top + (room * lane.weight) / whole) * ratio };
    const high = roundUp(Math.max(lane.isBars ? 2 : 1e-9, ...lane.values.filter(Number.isFinite)));
    paintScale(pen, lane.name, box, high, lane.isBars);
    const y = (value) => box.bottom - (value / high) * (box.bottom - box.top);
    if (lane.isBars) paintBars(pen, lane.values, { box, slot, middle, y }, { windows, ranks, at });
    else paintLine(pen, lane.values, middle, y, slot);
    top += (room * lane.weight) / whole + GAP;
  }
  paintSpans(pen, windows, spans, selected, slot, (height - SPANS + 2) * ratio);
  paintChosen(pen, middle(numbers.indexOf(at)), height);
}

function paintScale(pen, name, { top, bottom }, high, isBars) {
  const { ratio } = pen;
  const hair = Math.max(1, Math.round(ratio));
  const right = GUTTER * ratio;
  pen.fillStyle = css("--line");
  for (const y of [top, bottom]) pen.fillRect(right - 4 * ratio, Math.round(y) - (y === bottom ? hair : 0), pen.canvas.width - right + 4 * ratio, hair);
  pen.fillStyle = css("--soft");
  pen.font = font(pen, 10.5);
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillText(name, 0, (top + bottom) / 2);
  pen.textAlign = "right";
  pen.fillText(amount(high), right - 7 * ratio, top + ratio);
  pen.fillText("0", right - 7 * ratio, bottom - ratio);
  if (!isBars) return;
  pen.fillStyle = css("--faint");
  const usual = Math.round(bottom - (bottom - top) / high);
  for (let x = right; x < pen.canvas.width; x += 6 * ratio) pen.fillRect(x, usual, 2 * ratio, hair); // what is usual
}

function paintLine(pen, values, middle, y, slot) {
  const { ratio } = pen;
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 1.4 * ratio;
  pen.beginPath();
  values.forEach((value, k) => {
    if (!Number.isFinite(value)) return;
    const before = Number.isFinite(values[k - 1]);
    const alone = !before && !Number.isFinite(values[k + 1]);
    if (!before) pen.moveTo(middle(k) - (alone ? Math.min(3 * ratio, slot / 2) : 0), y(value));
    pen.lineTo(middle(k) + (alone ? Math.min(3 * ratio, slot / 2) : 0), y(value));
  });
  pen.stroke();
}

function paintBars(pen, peaks, { box, slot, middle, y }, { windows, ranks, at }) {
  const { ratio } = pen;
  const wide = slot > 14 * ratio ? Math.min(18 * ratio, Math.round(slot * 0.55)) : Math.max(1, Math.round(slot - (slot > 3 * ratio ? ratio : 0)));
  peaks.forEach((peak, k) => {
    const top = Math.min(box.bottom - 2 * ratio, y(Number.isFinite(peak) ? peak : 0));
    const chosen = at === "all" || at === windows.window[k];
    pen.fillStyle = css(windows.ranks[k] < ranks ? "--bad" : chosen ? "--ink" : "--faint");
    pen.globalAlpha = at === windows.window[k] ? 1 : 0.6;
    pen.fillRect(Math.round(middle(k) - wide / 2), top, wide, box.bottom - top);
    if (windows.ranks[k] < ranks) paintGap(pen, middle(k), box.top, ratio);
  });
  pen.globalAlpha = 1;
}

// Over the bar of a window in which a rank did not report: told by its form, too.
function paintGap(pen, x, y, ratio) {
  pen.globalAlpha = 1;
  pen.beginPath();
  pen.moveTo(x - 3 * ratio, y);
  pen.lineTo(x + 3 * ratio, y);
  pen.lineTo(x, y + 5 * ratio);
  pen.fill();
}

function paintSpans(pen, { window: firsts, last: ends }, spans, selected, slot, top) {
  const { ratio } = pen;
  const thick = Math.max(1, Math.floor(9 / Math.max(3, spans.length)));
  spans.forEach(({ finding, k, muted }, line) => {
    const from = ends.findIndex((end) => end >= finding.first_window);
    const to = firsts.findLastIndex((number) => number <= finding.last_window);
    if (from < 0 || to < from) return;
    pen.fillStyle = css(muted ? "--faint" : "--mark");
    pen.globalAlpha = selected < 0 || selected === k ? 0.95 : 0.35;
    pen.fillRect(GUTTER * ratio + from * slot, top + line * (thick + 1) * ratio, (to - from + 1) * slot - ratio, thick * ratio);
  });
  pen.globalAlpha = 1;
}

function paintChosen(pen, x, height) {
  if (x < GUTTER * pen.ratio) return;
  const { ratio } = pen;
  pen.fillStyle = css("--ink");
  pen.fillRect(Math.round(x - 0.5 * ratio), 4 * ratio, Math.max(1, Math.round(ratio)), (height - 4) * ratio);
  pen.beginPath();
  pen.arc(x, 4 * ratio, 4 * ratio, 0, 7);
  pen.fill();
}

// The legend: the colours of the scale, with round values and what they are of.

import { css, font } from "./dom.js";
import { digits } from "./format.js";

const [BAR, SIDE] = [9, 24]; // thickness, and room beside the bar for the outermost values

export const LEGEND_HEIGHT = 46;

const CAPTIONS = { ratio: "of the usual now", then: "of the usual then" };

// Centred in `width`, its top at `top`; all in CSS pixels.
export function paintLegend(pen, width, top, { kind, scale, colours, metric }) {
  const { ratio } = pen;
  const bar = Math.min(320, width - 2 * SIDE) * ratio;
  const left = Math.round((width * ratio - bar) / 2);
  for (let k = 0; k < 256; k++) {
    pen.fillStyle = colours.css[k];
    pen.fillRect(left + (k * bar) / 256, (top + 2) * ratio, bar / 256 + (k < 255 ? 1 : 0), BAR * ratio);
  }
  pen.fillStyle = css("--soft");
  pen.font = font(pen, 11);
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (const tick of scale.ticks()) {
    const x = left + (scale.index(tick) / 255) * bar;
    const edge = tick === scale.high ? "≥ " : tick === scale.low ? "≤ " : "";
    const name = scale.kind === "ratio" ? `${{ 0.125: "⅛", 0.25: "¼", 0.5: "½" }[tick] ?? tick}×` : digits(tick).replace(/\.0+$/, "");
    pen.fillRect(Math.round(x), (top + 2 + BAR) * ratio, Math.max(1, Math.round(ratio)), 3 * ratio);
    pen.fillText(`${edge}${name}`, x, (top + 26) * ratio);
  }
  pen.fillText(CAPTIONS[kind] ?? (metric === "tokens" ? "tokens per call" : "µs per call"), (width / 2) * ratio, (top + 41) * ratio);
}

// The picture of the matrix: title, cells, marks, scale and findings, laid out anew with room for all text.

import { css, font } from "./dom.js";
import { endOf, sentence, title } from "./findings.js";
import { layOut, paint } from "./heatmap.js";
import { LEGEND_HEIGHT, paintLegend } from "./legend.js";
import { markable, paintMarks } from "./marks.js";
import { caption, TITLES } from "./shown.js";
import { SvgPen } from "./svg_pen.js";

const [WIDTH, STAGE, RIM, LINE] = [960, 760, 28, 18]; // CSS pixels
const MOST_FINDINGS = 9;

// A Blob. form: "png" or "svg".
export function makePicture(store, form, moment) {
  const ratio = form === "svg" ? 1 : 2;
  const canvas = document.createElement("canvas");
  const ruler = Object.assign(canvas.getContext("2d"), { ratio: 1 });
  const text = layOutText(ruler, store, moment);
  const height = text.height + STAGE + LEGEND_HEIGHT + text.below.length * LINE + 2 * RIM;
  const pen = form === "svg" ? new SvgPen(WIDTH, height) : sized(canvas, height, ratio);
  pen.fillStyle = css("--ground");
  pen.fillRect(0, 0, WIDTH * ratio, height * ratio);
  writeText(pen, text, height);
  paintMatrix(pen, store, text.height);
  paintLegend(pen, WIDTH, text.height + STAGE, store.get("shown"));
  if (form === "svg") return Promise.resolve(new Blob([pen.toText()], { type: "image/svg+xml" }));
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function sized(canvas, height, ratio) {
  Object.assign(canvas, { width: WIDTH * ratio, height: height * ratio });
  return Object.assign(canvas.getContext("2d"), { ratio });
}

function paintMatrix(pen, store, top) {
  const view = store.get("shown");
  const place = layOut(WIDTH, STAGE, pen.ratio, view.n, view.nodes, store.get("zoom"), top);
  paint(pen, place, view);
  const [at, { findings, windows }] = [store.get("at"), store.get("overview")];
  const items = markable(findings?.findings ?? [], at, endOf(windows, at), store.get("finding"));
  paintMarks(pen, place, { hover: null, pick: store.get("pick"), items });
}

// Lines of text that fit the width: {head, source, below: [{text, weight}], height: of what is above the matrix}.
function layOutText(ruler, store, moment) {
  const view = store.get("shown");
  const room = WIDTH - 2 * RIM;
  const wrapped = (text, size, weight, indent = 0) => {
    ruler.font = font(ruler, size, weight);
    return wrap(ruler, text, room - indent);
  };
  const head = wrapped(`${TITLES[view.metric]}: ${caption(store)}`, 15, 600);
  const source = wrapped(`${store.get("overview").name} · ${moment}`, 12, 400);
  const all = store.get("overview").findings?.findings ?? [];
  const below = all.slice(0, MOST_FINDINGS).flatMap((finding, k) => [
    ...wrapped(`${k + 1}  ${title(finding)}`, 12, 600).map((text) => ({ text, weight: 600, indent: 0 })),
    ...wrapped(sentence(finding.evidence), 12, 400, 16).map((text) => ({ text, weight: 400, indent: 16 })),
  ]);
  if (all.length > MOST_FINDINGS) below.push({ text: `and ${all.length - MOST_FINDINGS} more findings`, weight: 400, indent: 0 });
  return { head, source, below, height: RIM + (head.length + 0.3) * 22 + source.length * LINE };
}

function writeText(pen, { head, source, below }, height) {
  const { ratio } = pen;
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  const write = (text, x, y, size, weight, colour) => {
    pen.fillStyle = css(colour);
    pen.font = font(pen, size, weight);
    pen.fillText(text, x * ratio, y * ratio);
  };
  head.forEach((text, k) => write(text, RIM, RIM + 14 + 22 * k, 15, 600, "--ink"));
  source.forEach((text, k) => write(text, RIM, RIM + 14 + 22 * head.length + LINE * k, 12, 400, "--soft"));
  const first = height - RIM - LINE * (below.length - 1);
  below.forEach(({ text, weight, indent }, k) => write(text, RIM + indent, first + LINE * k, 12, weight, weight > 400 ? "--ink" : "--soft"));
}

// Between words; a word that is longer than a line, as a path may be, anywhere.
export function wrap(ruler, text, room) {
  const lines = [];
  let line = "";
  const fits = (words) => ruler.measureText(words).width <= room;
  for (let word of text.split(" ")) {
    if (line && !fits(`${line} ${word}`)) {
      lines.push(line);
      line = "";
    }
    while (!fits(word)) {
      let most = word.length - 1;
      while (most > 1 && !fits(word.slice(0, most))) most--;
      lines.push(word.slice(0, most));
      word = word.slice(most);
    }
    line = line ? `${line} ${word}` : word;
  }
  return [...lines, line];
}

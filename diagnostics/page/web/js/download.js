// Downloads: the matrix as a picture with its title and scale, and the figures that it shows.

import { $, css, font } from "./dom.js";
import { title } from "./findings.js";

export function downloadPng(store) {
  const layers = [$("cells"), $("marks")];
  const ratio = window.devicePixelRatio || 1;
  const [top, legend, rim] = [64 * ratio, $("legend"), 20 * ratio];
  const out = document.createElement("canvas");
  out.width = Math.max(layers[0].width, legend.width) + 2 * rim;
  const findings = store.get("overview").findings?.findings ?? [];
  const lines = findings.slice(0, 9).map((finding, k) => `${k + 1}  ${title(finding)}: ${finding.evidence}`);
  out.height = top + layers[0].height + legend.height + (lines.length * 18 + 40) * ratio;
  const pen = out.getContext("2d");
  pen.ratio = ratio;
  pen.fillStyle = css("--ground");
  pen.fillRect(0, 0, out.width, out.height);
  pen.fillStyle = css("--ink");
  pen.font = font(pen, 15, 600);
  pen.fillText(`${$("matrix-title").textContent}, ${$("matrix-hint").textContent}`, rim, 26 * ratio);
  pen.fillStyle = css("--soft");
  pen.font = font(pen, 12);
  pen.fillText(`${store.get("overview").name} · ${$("moment").textContent.replace("calls", "calls, ")}`, rim, 46 * ratio, out.width - 2 * rim);
  for (const layer of layers) pen.drawImage(layer, rim, top);
  pen.drawImage(legend, rim, top + layers[0].height);
  pen.font = font(pen, 12);
  lines.forEach((line, k) => pen.fillText(line, rim, top + layers[0].height + legend.height + (24 + 18 * k) * ratio, out.width - 2 * rim));
  out.toBlob((blob) => save(blob, `${stem(store)}.png`), "image/png");
}

export function downloadJson(store) {
  const [overview, data, view] = ["overview", "data", "shown"].map((name) => store.get(name));
  const rows = (values) => Array.from({ length: data.n }, (_, i) => Array.from(values.subarray(i * data.n, (i + 1) * data.n), plain));
  const at = store.get("at");
  const document = {
    schema: "eprt.page-window/1",
    name: overview.name,
    window: at === "all" ? null : at,
    t_start: data.start,
    t_end: data.end,
    num_ranks: data.n,
    node_of_rank: overview.node_of_rank,
    shown: view.metric,
    dispatch_wait_us_per_call: rows(data.dispatch),
    combine_wait_us_per_call: rows(data.combine),
    recv_tokens_per_call: rows(data.tokens),
    compute_us_per_call: Array.from(data.compute, plain),
    num_calls: Array.from(data.calls, plain),
    findings: overview.findings,
  };
  save(new Blob([JSON.stringify(document, null, 1)], { type: "application/json" }), `${stem(store)}.json`);
}

// float32 has seven digits; null where there is nothing.
function plain(value) {
  return Number.isFinite(value) ? Number(value.toPrecision(7)) : null;
}

function stem(store) {
  const at = store.get("at");
  return `eprt-diagnose-${store.get("metric")}-${at === "all" ? "all-windows" : `window-${at}`}`;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

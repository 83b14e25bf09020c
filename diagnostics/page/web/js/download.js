// Downloads: the matrix as a picture, and the figures that it shows.

import { $ } from "./dom.js";
import { makePicture } from "./picture.js";

// form: "png" or "svg".
export async function downloadPicture(store, form) {
  save(await makePicture(store, form, $("moment").dataset.text), `${stem(store)}.${form}`);
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

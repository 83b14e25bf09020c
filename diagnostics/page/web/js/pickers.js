// Choosing a rank or a link, or a layer, from lists: for fingers, for which a cell is small, and for keyboards.

import { $, element } from "./dom.js";

export function showPickers(store) {
  const [row, column] = [$("pick-row"), $("pick-column")];
  let listed = 0;
  const choose = () => {
    const [i, j] = [row, column].map(({ value }) => (value === "" ? null : Number(value)));
    const rank = i ?? j;
    store.set({ finding: -1, pick: rank === null ? null : i === null || j === null ? { rank } : { i, j } });
  };
  for (const list of [row, column]) list.addEventListener("change", choose);
  store.on("overview pick", () => {
    const ranks = store.get("overview")?.num_ranks ?? 0;
    if (ranks !== listed) for (const list of [row, column]) fill(list, ["–", ...Array(ranks).keys()]);
    listed = ranks;
    const pick = store.get("pick");
    row.value = pick?.i ?? pick?.rank ?? "";
    column.value = pick?.j ?? "";
  });
}

export function showLayers(store, list, layers) {
  list.hidden = layers.length < 2;
  if (list.dataset.layers !== layers.join()) fill(list, layers.map((layer) => `layer ${layer}`), 0);
  list.dataset.layers = layers.join();
  list.value = String(Math.min(store.get("layer"), layers.length - 1));
  list.onchange = () => store.set({ layer: Number(list.value) });
}

// first: the value of the first name; below 0: it stands for nothing.
function fill(list, names, first = -1) {
  list.replaceChildren(...names.map((name, k) => element("option", { value: k + first < 0 ? "" : String(k + first) }, String(name))));
}

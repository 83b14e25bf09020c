// Keys that work everywhere on the page. Arrow keys are handled by the element that has the focus.

import { $, element } from "./dom.js";
import { choose } from "./findings.js";
import { METRICS, SCALES } from "./shown.js";

const HELP = [
  ["1 2 3 4", "wait, dispatch, combine, load"],
  ["u", "colour by × usual now, × usual then, or amount"],
  ["[ ]", "window before, window after"],
  ["{ }", "ten windows before, after"],
  ["a", "all windows together"],
  ["l", "live: follow the newest window"],
  ["j k", "next finding, previous finding"],
  ["m", "go to the matrix; then arrow keys move, with Shift by eight"],
  ["+ - 0", "in the matrix: nearer, farther, whole"],
  ["drag", "zoom to a block; double-click: to a pair of nodes"],
  ["t", "light or dark"],
  ["Esc", "nothing chosen"],
];

export function listenToKeys(store, timebar, toggleTheme) {
  const findings = () => store.get("overview")?.findings?.findings ?? [];
  const next = (by) => {
    const number = findings().length;
    if (number === 0) return;
    const at = store.get("finding");
    const index = at < 0 ? (by > 0 ? 0 : number - 1) : (at + by + number) % number;
    if (index !== at) choose(store, index);
    $("finding-list").querySelector(`[data-finding="${index}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const actions = {
    u: () => store.set({ scale: SCALES[(SCALES.findIndex(([scale]) => scale === store.get("scale")) + 1) % SCALES.length][0] }),
    "[": () => timebar.step(-1),
    "]": () => timebar.step(1),
    "{": () => timebar.step(-10),
    "}": () => timebar.step(10),
    a: () => timebar.toggleAll(),
    l: () => timebar.toggleFollow(),
    j: () => next(1),
    k: () => next(-1),
    m: () => $("cells").focus(),
    t: toggleTheme,
    "?": showHelp,
    Escape: () => store.set({ finding: -1, pick: null }),
  };
  METRICS.forEach(([metric], k) => (actions[k + 1] = () => store.set({ metric })));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || $("keys").open) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  $("help").addEventListener("click", showHelp);
}

function showHelp() {
  const dialog = $("keys");
  const rows = HELP.flatMap(([keys, what]) => [
    element("dt", {}, ...keys.split(" ").flatMap((key) => [element("kbd", {}, key), " "])),
    element("dd", {}, what),
  ]);
  dialog.replaceChildren(element("h2", {}, "Keys"), element("dl", {}, ...rows));
  dialog.onclick = () => dialog.close();
  dialog.showModal();
}

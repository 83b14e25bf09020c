// The present: who holds the others up now, which ranks take part, and how old the newest window is.

import { $ } from "./dom.js";
import { sentence, title } from "./findings.js";
import { ago, moment } from "./format.js";

const STALE = 3; // times as long as a window without a new one

// In words; "" while nobody does.
export function hangs(overview) {
  const lasting = (overview?.findings?.findings ?? []).filter((finding) => finding.kind === "hang" && finding.active);
  return lasting.map((finding) => `${title(finding)}: ${sentence(finding.evidence)} ${sentence(finding.advice)}`).join(" ");
}

// Of a server that goes on when ranks are lost: its view, and the ranks that are not simply there; else "".
export function members(overview) {
  const slots = overview?.findings?.slots;
  if (!slots) return "";
  const others = slots.ranks.filter(({ state }) => state !== "ready");
  const listed = others.map(({ rank, state, since_s: since }) => `rank ${rank} ${state} since ${moment(since)}`);
  return `view ${slots.view}${listed.length ? `: ${listed.join(", ")}` : ""}`;
}

export function showPresent(store) {
  let skew = 0; // of this computer's clock against that of the page's server

  function show() {
    const overview = store.get("overview");
    const { t_start: begins = [], t_end: ends = [] } = overview?.windows ?? {};
    const live = Boolean(overview?.live && ends.length);
    const age = live ? Math.max(0, Date.now() / 1000 - skew - ends.at(-1)) : 0;
    const hang = Boolean(hangs(overview));
    $("age").textContent = live ? `newest window ${ago(age)}` : "";
    $("age").classList.toggle("bad", hang);
    $("follow").classList.toggle("bad", hang);
    $("follow").classList.toggle("stale", live && age > STALE * Math.max(1, ends.at(-1) - begins.at(-1)));
  }

  store.on("overview", () => {
    const now = store.get("overview")?.now;
    if (Number.isFinite(now)) skew = Date.now() / 1000 - now;
    show();
  });
  setInterval(show, 1000);
}

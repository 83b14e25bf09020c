// The list of findings: what is wrong in words, since when, and what to do.

import { $, element } from "./dom.js";
import { clock, count, digits, times, whole } from "./format.js";
import { askToMute, muteOf } from "./mutes.js";

const MOST_LISTED = 40;

const TITLES = {
  "column comp": ({ rank }) => `Rank ${rank} arrives late`,
  "column comm": ({ rank }) => `Rank ${rank} is slow to send`,
  "column mixed": ({ rank }) => `Rank ${rank} is overloaded`,
  "row comp": ({ rank }) => `Rank ${rank} has little to do`,
  "row comm": ({ rank }) => `Rank ${rank} is slow to receive`,
  "row mixed": ({ rank }) => `Rank ${rank} receives too much`,
  "point comm": ({ src, dst }) => `Link ${dst} → ${src} is slow`,
  "point mixed": ({ src, dst }) => `Link ${dst} → ${src} is overloaded`,
};
const WIDE = {
  job: () => "The whole job is slower than before",
  tier: ({ tier }) => `Links ${tier} are slow`,
  node: ({ nodes }) => `Node ${nodes[0]} is slow`,
  path: ({ nodes }) => `The path between nodes ${nodes[0]} and ${nodes[1]} is slow`,
};
const CAUSES = {
  comm: "communication",
  comp: "computation",
  mixed: "load",
  stopped: "its process stands still",
  unknown: "cause not proved",
};

export function title(finding) {
  const make = TITLES[`${finding.kind} ${finding.cause}`];
  if (make) return make(finding);
  const pair = finding.rank === null && Number.isInteger(finding.src);
  if (finding.kind === "hang") return pair ? `Ranks ${finding.src} and ${finding.dst} wait for each other` : `Rank ${finding.rank} hangs`;
  if (WIDE[finding.kind]) return WIDE[finding.kind](finding);
  return finding.kind === "point" ? `Link ${finding.dst} → ${finding.src} stands out` : `Rank ${finding.rank} stands out`;
}

function pickOf({ kind, rank, src, dst }) {
  if (WIDE[kind]) return null;
  return rank === null ? { i: src, j: dst } : { rank };
}

// The last of the windows that share the place that begins with `at`, as they do in a very long run.
export function endOf(windows, at) {
  return windows.last[windows.window.indexOf(at)] ?? at;
}

export function choose(store, index) {
  const findings = store.get("overview").findings?.findings ?? [];
  const finding = findings[index];
  if (!finding || index === store.get("finding")) {
    store.set({ finding: -1, pick: null });
    return;
  }
  const changes = { finding: index, pick: pickOf(finding) };
  const at = store.get("at");
  const { windows } = store.get("overview");
  if (at !== "all" && (endOf(windows, at) < finding.first_window || at > finding.last_window)) {
    Object.assign(changes, { at: windows.window.findLast((number) => number <= finding.last_window) ?? at, follow: false });
  }
  store.set(changes);
}

export function showFindings(store) {
  store.on("overview finding", () => {
    const overview = store.get("overview");
    if (!overview) return;
    const report = overview.findings;
    const all = report?.findings ?? [];
    $("verdict").textContent = verdict(overview);
    const { window: numbers, last } = overview.windows;
    const ends = [numbers[0], last.at(-1)];
    const listed = all.slice(0, MOST_LISTED).map((finding, k) => item(store, finding, k, ends));
    if (all.length > MOST_LISTED) {
      const more = `and ${all.length - MOST_LISTED} more, less certain; the JSON download has them all`;
      listed.push(element("li", { class: "more" }, more));
    }
    for (const { evidence } of report?.early ?? []) listed.push(element("li", { class: "more" }, sentence(evidence)));
    const { finding: focused, mute } = document.activeElement?.dataset ?? {};
    $("finding-list").replaceChildren(...listed);
    const again = [...$("finding-list").querySelectorAll("button")].find(({ dataset }) => dataset.finding === focused && dataset.mute === mute);
    if (focused !== undefined || mute !== undefined) again?.focus();
    showProblems(overview.problems);
  });
}

function verdict({ findings, progress, windows, num_ranks: ranks }) {
  if (!findings) return progress < 1 ? "Reading the log…" : "Looking for what stands out…";
  if (windows.window.length === 0) return "No window yet.";
  if (ranks === 1) return "One rank waits for nobody: there is nothing to compare.";
  const number = findings.findings.length;
  if (number === 0) return "No rank and no link stands out.";
  const muted = findings.findings.filter((finding) => finding.muted_until).length;
  return `${count(number, "thing")} stand${number === 1 ? "s" : ""} out${muted ? `, ${muted === number ? "muted" : `${muted} of them muted`}` : ""}`;
}

function item(store, finding, k, [first, last]) {
  const pressed = store.get("finding") === k;
  const span = Math.max(1, last - first + 1);
  const bar = element("i");
  bar.style.left = `${(100 * Math.max(0, finding.first_window - first)) / span}%`;
  bar.style.width = `${(100 * Math.max(1, Math.min(last, finding.last_window) - Math.max(first, finding.first_window) + 1)) / span}%`;
  const its = finding.first_window === finding.last_window ? `window ${finding.first_window}` : `windows ${finding.first_window}–${finding.last_window}`;
  const lasts = finding.active ?? finding.last_window >= last;
  const lasting = lasts ? `since window ${finding.first_window}` : its;
  const button = element(
    "button",
    { type: "button", "aria-pressed": String(pressed), "data-finding": String(k), onclick: () => choose(store, k) },
    element("span", { class: "badge" }, String(k + 1)),
    element("span", { class: "finding-title" }, title(finding)),
    element(
      "span",
      { class: "finding-facts" },
      element("b", {}, finding.ratio > 0 ? times(finding.ratio) : "holds all up"),
      ` · ${CAUSES[finding.cause] ?? finding.cause} · ${sureness(finding.confidence)}`,
      element("br"),
      lasting + moments(finding),
      ...places(finding).flatMap((text) => [element("br"), text]),
    ),
    element("span", { class: "finding-span", title: `${its} of ${first}–${last}` }, bar),
    element("span", { class: "finding-advice" }, sentence(finding.advice)),
    element("span", { class: "finding-evidence" }, sentence(finding.evidence)),
  );
  return element("li", { class: finding.muted_until ? "muted" : null }, button, finding.place ? muteButton(store, finding) : null);
}

function muteButton(store, finding) {
  const name = finding.muted_until ? "Unmute" : "Mute";
  const ask = () => askToMute(finding, title(finding), store.get("overview").muting ?? {}, () => document.dispatchEvent(new Event("stale")));
  return element("button", { type: "button", class: "mute", "data-mute": finding.place, "aria-label": `${name}: ${title(finding)}`, onclick: ask }, name);
}

// When, by the clock; "" where an older server does not tell.
function moments({ t_start: begin, t_end: end, burst }) {
  if (!Number.isFinite(begin)) return "";
  return ` · ${burst ? "a burst at" : "from"} ${clock(begin)}${Number.isFinite(end) ? ` to ${clock(end)}` : ""}`;
}

// Whose process it is, and what it costs.
function places(finding) {
  const { host, pid, gpu, cost } = finding;
  const lines = host ? [`${host}, pid ${pid}${gpu ? `, ${gpu}` : ""}`] : [];
  lines.push(...costs(cost));
  if (finding.muted_until) lines.push(muteOf(finding));
  return lines;
}

function costs(cost) {
  if (!(cost?.lost >= 0.005)) return [];
  if (cost.us_per_call === null) return ["costs everything: no step ends meanwhile"];
  const lines = [`costs ${Math.round(100 * cost.lost)} % of the time`];
  if (cost.step_ms) lines.push(`a step takes ${digits(cost.step_ms)} ms, ${digits(cost.step_ms_without)} ms without it`);
  if (cost.tokens_per_s) lines.push(`${whole(cost.tokens_per_s)} tokens/s, ${whole(cost.tokens_per_s_without)} without it`);
  return lines;
}

function sureness(confidence) {
  return confidence >= 0.995 ? ">\u202f99\u202f% sure" : `${Math.floor(100 * confidence)}\u202f% sure`;
}

export function sentence(text) {
  const words = String(text ?? "");
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?)]$/.test(words) || !words ? "" : ".");
}

function showProblems({ count: number, first }) {
  const box = $("problems");
  box.hidden = number === 0;
  box.querySelector("summary").textContent = `${count(number, "remark")} about the log`;
  const listed = first.map((text) => element("li", {}, text));
  if (number > first.length) listed.push(element("li", {}, `and ${number - first.length} more`));
  box.querySelector("ul").replaceChildren(...listed);
}

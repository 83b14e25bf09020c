// Instances: what each does, the requests that are on their way from one to another, and the tiers of service.

import { getJson } from "./data.js";
import { $, element, figures } from "./dom.js";
import { bytes, count, digits, seconds, whole } from "./format.js";

const POLL_MS = 2000;
const MOST_LISTED = 8;
const OUTCOMES = {
  late_first_token: "late first token",
  slow_tokens: "slow tokens",
  late_and_slow: "late and slow",
  refused: "refused",
  failed: "failed",
  aborted: "client left",
};
const RECENT_S = 60;

// Asks for them as long as there are any: a log or a server of one group of ranks has none.
export function showInstances() {
  const history = []; // {at, tiers}, of the last minute
  const look = async () => {
    let document_;
    try {
      document_ = await getJson("api/instances");
    } catch {
      setTimeout(look, POLL_MS); // the banner says that the server is lost
      return;
    }
    if (!document_) return;
    const at = performance.now() / 1000;
    history.push({ at, tiers: document_.tiers ?? [] });
    while (history.length > 2 && at - history[1].at > RECENT_S) history.shift();
    show(document_, history);
    setTimeout(look, POLL_MS);
  };
  look();
}

function show({ instances, instances_lost: lost, starting = [], scale, handoffs, tiers }, history) {
  const roles = ["prefill", "decode"].map((role) => instances.filter((one) => one.role === role));
  const notes = ["prefill", "decode"].map((role) => [...comingTo(role, starting), ...planFor(role, scale)]);
  $("instances").hidden = false;
  $("instances-title").textContent = instances.length ? "Instances" : "Tiers";
  $("instances-hint").textContent = hint(roles, lost);
  const columns = instances.length
    ? [
        group("Prefill", roles[0], notes[0], "none: decode instances compute prompts"),
        onTheirWay(handoffs),
        group("Decode", roles[1], notes[1], "none: prefill instances go on themselves"),
      ]
    : [];
  $("instances-body").replaceChildren(...columns, ...(tiers?.length ? [tierTable(tiers, history)] : []));
}

function hint([prefill, decode], lost) {
  if (prefill.length + decode.length === 0) return "";
  return `${prefill.length} prefill, ${decode.length} decode${lost ? `; ${lost} lost since the start` : ""}`;
}

function group(name, instances, notes, none) {
  const cards = instances.length ? instances.map(card) : [element("p", {}, none)];
  return element("div", { class: "role" }, element("h3", {}, name), ...cards, ...notes.map((note) => element("p", {}, note)));
}

// Those that were asked for and have not come.
function comingTo(role, starting) {
  return starting.filter((one) => one.role === role).map((one) => `${one.name ?? "one more"} is being started with ${count(one.ranks, "rank")}`);
}

// What the planner of instances wants, and why.
function planFor(role, scale) {
  const plan = scale?.roles[role];
  if (!plan) return [];
  const wanted = plan.wanted === null ? "" : `${plan.wanted} wanted of ${plan.least} to ${plan.most}: `;
  return [`--scale ${scale.mode}: ${wanted}${plan.why}`];
}

function card(one) {
  const own = decodeURIComponent(location.pathname).includes(`/instances/${one.name}/`);
  const page = location.pathname.includes("/v1/eprt/") ? `/v1/eprt/instances/${encodeURIComponent(one.name)}/diagnose/page/` : null;
  const name = page && !own ? element("a", { href: page, title: "Its diagnosis" }, one.name) : element("b", {}, one.name);
  const full = one.kv_pages ? one.kv_pages_used / one.kv_pages : 0;
  const bar = element("i");
  bar.style.width = `${100 * full}%`;
  const ranks = one.ranks.map(({ rank }) => rank);
  const speed = one.role === "prefill" ? speedOf(one) : stepOf(one);
  return element(
    "div",
    { class: `instance ${one.state}${own ? " own" : ""}`, "data-instance": one.name },
    element("div", { class: "instance-head" }, name, element("span", { class: "state" }, one.state)),
    element("p", {}, `${ranks.length > 1 ? `ranks ${ranks[0]}–${ranks.at(-1)}` : `rank ${ranks[0] ?? "–"}`}${own ? " · this page" : ""}`),
    figures([
      ["running", whole(one.running), one.waiting ? `${whole(one.waiting)} wait` : ""],
      one.role === "prefill" ? ["held for others", whole(one.held)] : ["arriving", whole(one.arriving)],
      ["KV in use", one.kv_pages ? `${Math.round(100 * full)} %` : "–", one.kv_pages ? `${whole(one.kv_pages_used)} of ${count(one.kv_pages, "page")}` : ""],
      speed,
    ]),
    element("div", { class: "kv", role: "img", "aria-label": `${Math.round(100 * full)} % of the KV pages are in use` }, bar),
  );
}

function speedOf({ prefill_tokens_per_s: speed }) {
  return ["prompts", speed > 0 ? `${whole(speed)} tokens/s` : "not measured yet"];
}

function stepOf({ predicted_step_s: { step, row, token }, running, tokens }) {
  const predicted = step + row * running + token * tokens;
  return ["step, predicted", predicted > 0 ? seconds(predicted) : "not measured yet"];
}

function onTheirWay(handoffs) {
  const { under_way: now, oldest = [], num_done: done, num_failed: failed, num_late: late, num_replayed: replayed } = handoffs;
  const longest = Math.max(1, ...oldest.map((offer) => offer.age_s));
  const rows = oldest.slice(0, MOST_LISTED).map((offer) => {
    const bar = element("i");
    bar.style.width = `${(100 * offer.age_s) / longest}%`;
    return element(
      "li",
      {},
      element("span", {}, `${offer.from} → ${offer.to}`),
      element("span", {}, `${count(offer.pages, "page")}, ${bytes(offer.bytes)} · ${seconds(offer.age_s)}`),
      element("div", { class: "kv" }, bar),
    );
  });
  if (now > rows.length) rows.push(element("li", {}, `and ${whole(now - rows.length)} younger`));
  const pages = handoffs.num_pulled + handoffs.num_shared;
  return element(
    "div",
    { class: "role", id: "on-their-way" },
    element("h3", {}, now ? `${count(now, "request")} on ${now === 1 ? "its" : "their"} way` : "No request on its way"),
    element("ol", {}, ...rows),
    figures([
      ["handed over", whole(done), done ? `${seconds(handoffs.wait_s / done)} each` : ""],
      ["pages pulled", whole(handoffs.num_pulled), pages ? `${Math.round((100 * handoffs.num_shared) / pages)} % were there` : ""],
      ["failed · late", `${whole(failed)} · ${whole(late)}`, "", failed + late ? "long" : ""],
      ["began again", whole(replayed)],
    ]),
  );
}

function tierTable(tiers, history) {
  const [first] = history;
  const passed = performance.now() / 1000 - first.at;
  const rows = tiers.map((tier) => {
    const ended = sum(tier.requests) - tier.requests.aborted;
    const before = first.tiers.find(({ name }) => name === tier.name);
    const rate = before && passed > 1 ? `${digits((tier.tokens.met - before.tokens.met) / passed)} /s` : "–";
    const missed = Object.entries(OUTCOMES).filter(([outcome]) => tier.requests[outcome]);
    const cells = [
      tier.name,
      `${seconds(tier.ttft_s)}, ${seconds(tier.itl_s)}`,
      whole(tier.sequences),
      ended ? `${Math.floor((100 * tier.requests.met) / ended)} % of ${whole(ended)}` : "–",
      rate,
      missed.map(([outcome, name]) => `${whole(tier.requests[outcome])} ${name}`).join(", ") || "–",
    ];
    return element("tr", { "data-tier": tier.name }, ...cells.map((text) => element("td", {}, text)));
  });
  const names = ["tier", "first token, token", "now", "within both limits", "tokens within", "not"];
  const head = element("tr", {}, ...names.map((text) => element("th", { scope: "col" }, text)));
  const table = element("table", { class: "moves" }, element("thead", {}, head), element("tbody", {}, ...rows));
  const title = "Tiers of service since the start; tokens within limits per second, over the last minute";
  return element("div", { class: "tiers" }, element("h3", {}, title), table);
}

function sum(counts) {
  return Object.values(counts).reduce((a, b) => a + b, 0);
}

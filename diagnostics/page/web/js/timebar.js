// The bar at the bottom: the slider over the lanes of the strip, and the chosen window in words.

import { $, element, fit } from "./dom.js";
import { clock, count, day, digits } from "./format.js";
import { title } from "./findings.js";
import { callsPerSecond, GUTTER, MOST_SPANS, paintStrip } from "./strip.js";

export class TimeBar {
  #store;

  constructor(store) {
    this.#store = store;
    new ResizeObserver(() => this.#paint()).observe($("strip"));
    store.on("overview at finding theme", () => this.#show());
    store.on("follow at", () => {
      $("follow").setAttribute("aria-pressed", String(store.get("follow")));
      $("all").setAttribute("aria-pressed", String(store.get("at") === "all"));
    });
    $("slider").addEventListener("input", () => this.#go(Number($("slider").value)));
    // At "all" the slider may already have the wanted value; then it sends no input event.
    $("slider").addEventListener("pointerup", () => this.#go(Number($("slider").value)));
    $("slider").addEventListener("keyup", ({ key }) => /^(Home|End|Arrow|Page)/.test(key) && this.#go(Number($("slider").value)));
    $("follow").addEventListener("click", () => this.toggleFollow());
    $("all").addEventListener("click", () => this.toggleAll());
  }

  #windows() {
    return this.#store.get("overview")?.windows ?? { window: [], last: [] };
  }

  #go(index) {
    const number = this.#windows().window[index];
    if (number !== undefined) this.#store.set({ at: number, follow: false });
  }

  // By a number of windows, from the keys.
  step(by) {
    const { window: numbers } = this.#windows();
    const at = this.#store.get("at");
    const index = at === "all" ? (by > 0 ? -1 : numbers.length) : numbers.indexOf(at);
    this.#go(Math.max(0, Math.min(numbers.length - 1, index + by)));
  }

  toggleFollow() {
    const follow = !this.#store.get("follow");
    const newest = this.#windows().window.at(-1);
    this.#store.set(follow && newest !== undefined ? { follow, at: newest } : { follow });
  }

  toggleAll() {
    const newest = this.#windows().window.at(-1);
    if (this.#store.get("at") !== "all") this.#store.set({ at: "all", follow: false });
    else if (newest !== undefined) this.#store.set({ at: newest });
  }

  #show() {
    const windows = this.#windows();
    const [slider, at] = [$("slider"), this.#store.get("at")];
    const index = at === "all" ? -1 : windows.window.indexOf(at);
    slider.max = Math.max(0, windows.window.length - 1);
    slider.disabled = windows.window.length === 0;
    if (index >= 0) slider.value = index;
    slider.style.left = `${GUTTER}px`;
    slider.style.width = `calc(100% - ${GUTTER}px)`;
    slider.setAttribute("aria-valuetext", index < 0 ? "all windows" : `window ${at}${windows.last[index] > at ? ` to ${windows.last[index]}` : ""}, ${clock(windows.t_start[index])}`);
    const lines = this.#moment(windows, index);
    $("moment").replaceChildren(lines[0], ...lines.slice(1).map((line) => element("small", {}, line)));
    $("moment").dataset.text = lines.join(", ");
    this.#paint();
  }

  // What is chosen, its rates, and when it was.
  #moment(windows, index) {
    if (windows.window.length === 0) return ["no window yet"];
    if (index < 0) {
      const times = `${day(windows.t_start[0])}, ${clock(windows.t_start[0])} – ${clock(windows.t_end.at(-1))}`;
      return [count(this.#store.get("overview").findings?.windows ?? windows.window.length, "window"), times];
    }
    const times = `${day(windows.t_start[index])}, ${clock(windows.t_start[index])} – ${clock(windows.t_end[index])}`;
    const [first, last] = [windows.window[index], windows.last[index]];
    const name = first === last ? `Window ${first}` : `Windows ${first}–${last}`;
    const step = windows.step_ms?.[index] ?? null;
    const rates = `${digits(callsPerSecond(windows, index))} calls/s${step === null ? "" : ` · step ${digits(step)} ms`}`;
    return [`${name} · ${count(windows.calls[index], "call")}`, rates, times];
  }

  #paint() {
    const { width, height } = $("strip").getBoundingClientRect();
    const pen = fit($("strip-canvas"), width, height);
    const windows = this.#windows();
    if (!pen || windows.window.length === 0) return;
    const { findings, num_ranks: ranks } = this.#store.get("overview");
    const listed = (findings?.findings ?? []).map((finding, k) => ({ finding, k, muted: Boolean(finding.muted_until) }));
    const selected = this.#store.get("finding");
    const spans = listed.filter(({ k }) => k < MOST_SPANS || k === selected).slice(-MOST_SPANS - 1);
    paintStrip(pen, { width, height }, { windows, ranks, spans, at: this.#store.get("at"), selected });
    $("strip").title = spans.map(({ finding, k }) => `${k + 1}: ${title(finding)}`).join("\n");
  }
}

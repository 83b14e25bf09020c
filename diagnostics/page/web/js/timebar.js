// The bar at the bottom: a stroke per window, the windows of each finding, and the slider.

import { $, css, fit } from "./dom.js";
import { clock, count, day } from "./format.js";
import { title } from "./findings.js";

const MOST_SPANS = 4;

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
    slider.setAttribute("aria-valuetext", index < 0 ? "all windows" : `window ${at}${windows.last[index] > at ? ` to ${windows.last[index]}` : ""}, ${clock(windows.t_start[index])}`);
    $("moment").replaceChildren(...this.#moment(windows, index));
    this.#paint();
  }

  #moment(windows, index) {
    const small = document.createElement("small");
    if (windows.window.length === 0) return ["no window yet"];
    if (index < 0) {
      small.textContent = `${day(windows.t_start[0])}, ${clock(windows.t_start[0])} – ${clock(windows.t_end.at(-1))}`;
      return [count(this.#store.get("overview").findings?.windows ?? windows.window.length, "window"), small];
    }
    small.textContent = `${day(windows.t_start[index])}, ${clock(windows.t_start[index])} – ${clock(windows.t_end[index])}`;
    const [first, last] = [windows.window[index], windows.last[index]];
    const name = first === last ? `Window ${first}` : `Windows ${first}–${last}`;
    return [`${name} · ${count(windows.calls[index], "call")}`, small];
  }

  #paint() {
    const { width, height } = $("strip").getBoundingClientRect();
    const pen = fit($("strip-canvas"), width, height);
    const windows = this.#windows();
    if (!pen || windows.window.length === 0) return;
    const { ratio } = pen;
    const [w, base] = [width * ratio, (height - 10) * ratio];
    const numbers = windows.window;
    const slot = w / numbers.length;
    const at = this.#store.get("at");
    const high = Math.max(3, ...windows.peak.filter((peak) => peak !== null)) ** 0.7;
    numbers.forEach((number, k) => {
      const stroke = slot > 14 * ratio ? Math.min(18 * ratio, Math.round(slot * 0.55)) : Math.max(1, Math.round(slot - (slot > 3 * ratio ? ratio : 0)));
      const x = Math.round((k + 0.5) * slot - stroke / 2);
      const peak = windows.peak[k] ?? 0;
      const tall = Math.max(2 * ratio, ((peak ** 0.7) / high) * (base - 4 * ratio));
      const chosen = at === "all" || at === number;
      pen.fillStyle = css(windows.ranks[k] < this.#store.get("overview").num_ranks ? "--bad" : chosen ? "--ink" : "--faint");
      pen.globalAlpha = at === number ? 1 : at === "all" ? 0.45 : 0.4;
      pen.beginPath();
      pen.roundRect(x, base - tall, stroke, tall, [stroke > 4 * ratio ? 2 * ratio : 0, stroke > 4 * ratio ? 2 * ratio : 0, 0, 0]);
      pen.fill();
    });
    pen.globalAlpha = 1;
    this.#paintSpans(pen, numbers, slot, base);
    const index = numbers.indexOf(at);
    if (index >= 0) {
      pen.fillStyle = css("--ink");
      const x = (index + 0.5) * slot;
      pen.fillRect(Math.round(x - 0.5 * ratio), 5 * ratio, Math.max(1, Math.round(ratio)), base + 5 * ratio);
      pen.beginPath();
      pen.arc(x, 5 * ratio, 4.5 * ratio, 0, 7);
      pen.fill();
    }
  }

  #paintSpans(pen, numbers, slot, base) {
    const { ratio } = pen;
    const ends = this.#windows().last;
    const findings = this.#store.get("overview").findings?.findings ?? [];
    const selected = this.#store.get("finding");
    const shown = findings.map((finding, k) => [finding, k]).filter(([, k]) => k < MOST_SPANS || k === selected);
    const thick = Math.max(1, Math.floor(8 / Math.max(3, shown.length)));
    shown.slice(-MOST_SPANS - 1).forEach(([finding, k], line) => {
      const from = ends.findIndex((end) => end >= finding.first_window);
      const to = numbers.findLastIndex((number) => number <= finding.last_window);
      if (from < 0 || to < from) return;
      pen.fillStyle = css("--mark");
      pen.globalAlpha = selected < 0 || selected === k ? 0.95 : 0.35;
      pen.fillRect(from * slot, base + (2 + line * (thick + 1)) * ratio, (to - from + 1) * slot - ratio, thick * ratio);
    });
    pen.globalAlpha = 1;
    $("strip").title = shown.map(([finding, k]) => `${k + 1}: ${title(finding)}`).join("\n");
  }
}

// Light or dark: as the system has it, until the user chooses.

import { $, shape } from "./dom.js";

const KEY = "eprt-theme";
const SUN = "M8 1.2v1.6M8 13.2v1.6M1.2 8h1.6M13.2 8h1.6M3.2 3.2l1.1 1.1M11.7 11.7l1.1 1.1M3.2 12.8l1.1-1.1M11.7 4.3l1.1-1.1M8 5a3 3 0 1 0 0 6a3 3 0 0 0 0-6z";
const MOON = "M13.6 9.6A6 6 0 0 1 6.4 2.4a6 6 0 1 0 7.2 7.2z";

// Returns the function that switches between the two.
export function startTheme(store) {
  const system = matchMedia("(prefers-color-scheme: light)");
  const chosen = remembered();
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const icon = shape("svg", { viewBox: "0 0 16 16", fill: "none", stroke: "currentColor", "stroke-width": "1.4", "stroke-linecap": "round" });
    icon.append(shape("path", { d: theme === "dark" ? SUN : MOON }));
    $("theme").replaceChildren(icon);
    store.set({ theme });
  };
  apply(chosen ?? (system.matches ? "light" : "dark"));
  system.addEventListener("change", () => remembered() ?? apply(system.matches ? "light" : "dark"));
  const toggle = () => {
    const theme = store.get("theme") === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // a private window may refuse to store it; the choice then lasts as long as the page
    }
    apply(theme);
  };
  $("theme").addEventListener("click", toggle);
  return toggle;
}

function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

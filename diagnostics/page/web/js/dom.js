// Small helpers around the document. Text goes in as text, never as markup.

export const $ = (id) => document.getElementById(id);

// element("p", {class: "hint", onclick: f}, "text", child, ...)
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function shape(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// The pen of a canvas that is resized to its place on the page, in device pixels; null while it has no size.
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (width < 4 || height < 4) return null;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, w, h);
  pen.ratio = ratio;
  return pen;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function font(pen, size, weight = 400) {
  return `${weight} ${size * pen.ratio}px ${css("--sans")}`;
}

// A row of buttons of which one is chosen; arrow keys move as in any radio group.
export function segments(parent, options, store, name) {
  parent.replaceChildren(
    ...options.map(([value, label, title]) =>
      element("button", { type: "button", role: "radio", title, "data-value": value, onclick: () => store.set({ [name]: value }) }, label),
    ),
  );
  parent.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const at = options.findIndex(([value]) => value === store.get(name));
    const next = (at + step + options.length) % options.length;
    store.set({ [name]: options[next][0] });
    parent.children[next].focus();
  });
  store.on(name, () => {
    for (const button of parent.children) {
      const chosen = button.dataset.value === store.get(name);
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  });
}

export function tooltip(event, ...content) {
  const box = $("tooltip");
  if (!event) {
    box.hidden = true;
    return;
  }
  box.replaceChildren(...content);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const right = event.clientX + 16 + width < innerWidth;
  const below = event.clientY + 16 + height < innerHeight - document.querySelector("footer").offsetHeight;
  box.style.left = `${right ? event.clientX + 16 : Math.max(4, event.clientX - 14 - width)}px`;
  box.style.top = `${below ? event.clientY + 16 : Math.max(4, event.clientY - 14 - height)}px`;
}

// Rows of [name, value, ratio] as a small table.
export function figures(rows) {
  return element(
    "dl",
    { class: "figures" },
    ...rows.flatMap(([name, value, ratio, tone]) => [
      element("dt", {}, name),
      element("dd", {}, value),
      element("dd", { class: `ratio ${tone ?? ""}` }, ratio ?? ""),
    ]),
  );
}

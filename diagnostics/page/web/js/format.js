// Figures and words. Times of waits come in microseconds.

export function micros(value) {
  if (!Number.isFinite(value)) return "no data";
  if (value >= 1e6) return `${digits(value / 1e6)} s`;
  if (value >= 1e4) return `${digits(value / 1e3)} ms`;
  return `${digits(value)} µs`;
}

// Three significant digits, without an exponent.
export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return whole(value);
  if (size >= 10) return value.toFixed(1);
  return size === 0 ? "0" : value.toFixed(2);
}

// For a cell that has room for few characters.
export function brief(value) {
  if (!Number.isFinite(value)) return "";
  if (value >= 1e6) return `${(value / 1e6).toPrecision(2)}M`;
  if (value >= 1e4) return `${Math.round(value / 1e3)}k`;
  if (value >= 100) return String(Math.round(value));
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
}

export function times(ratio) {
  if (!Number.isFinite(ratio)) return "";
  return `${ratio >= 100 ? Math.round(ratio) : ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2)}×`;
}

// A round value of a scale: without needless digits.
export function amount(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  return value >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : String(+value.toPrecision(3));
}

export function roundMicros(value) {
  if (value >= 1e6) return `${amount(value / 1e6)} s`;
  return value >= 1e3 ? `${amount(value / 1e3)} ms` : `${amount(value)} µs`;
}

export function seconds(value) {
  if (value >= 100) return `${whole(value)} s`;
  return value >= 1 ? `${+value.toPrecision(3)} s` : `${+(1000 * value).toPrecision(3)} ms`;
}

export function bytes(value) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${+(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// 12 345: thousands apart by a narrow space.
export function whole(number) {
  return Math.round(number).toLocaleString("en-US").replaceAll(",", "\u202f");
}

export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

export function ago(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

export function day(seconds) {
  return new Date(seconds * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

export function moment(seconds) {
  return `${day(seconds)}, ${new Date(seconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
}

// "long", "short" or "": worth a colour?
export function tendency(ratio) {
  if (!Number.isFinite(ratio)) return "";
  return ratio >= 1.5 ? "long" : ratio <= 1 / 1.5 ? "short" : "";
}

// Colour scales, made in OKLab: equal steps of a value are equal steps to the eye. Lightness alone goes one way from the
// smallest value to the largest, so both scales also read in grey; blue against orange tells below from above the usual.

const STEPS = 256;

// [lightness, chroma, hue] from the smallest value to the largest. The smallest is close to the page's ground; the usual
// value, in the middle of a ratio's, is grey.
const STOPS = {
  dark: {
    amount: [[0.245, 0.035, 275], [0.37, 0.12, 293], [0.52, 0.19, 340], [0.68, 0.18, 25], [0.82, 0.15, 65], [0.96, 0.09, 100]],
    ratio: [[0.27, 0.13, 264], [0.325, 0.11, 260], [0.375, 0.065, 256], [0.425, 0.008, 265], [0.58, 0.12, 50], [0.77, 0.155, 66], [0.97, 0.075, 100]],
  },
  light: {
    amount: [[0.97, 0.015, 95], [0.9, 0.085, 85], [0.77, 0.15, 58], [0.6, 0.2, 22], [0.42, 0.16, -20], [0.24, 0.09, -70]],
    ratio: [[0.965, 0.035, 232], [0.93, 0.05, 236], [0.89, 0.035, 240], [0.845, 0.004, 90], [0.72, 0.115, 66], [0.55, 0.15, 46], [0.3, 0.11, 30]],
  },
};

function toSrgb([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

function toBytes(lab) {
  // Out of what a screen can show: less chroma, same lightness and hue.
  let linear = toSrgb(lab);
  for (let chroma = 0.95; chroma > 0 && linear.some((v) => v < -0.0005 || v > 1.0005); chroma -= 0.05) {
    linear = toSrgb([lab[0], lab[1] * chroma, lab[2] * chroma]);
  }
  return linear.map((v) => {
    const u = Math.min(1, Math.max(0, v));
    return Math.round(255 * (u <= 0.0031308 ? 12.92 * u : 1.055 * u ** (1 / 2.4) - 0.055));
  });
}

function toLab([lightness, chroma, hue]) {
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

const MIDDLE = Math.sqrt(0.05 * 1.05) - 0.05; // as far from black as from white, by WCAG's contrast

function luminance(...bytes) {
  const [r, g, b] = bytes.map((byte) => (byte <= 10 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// {css[256], words[256] (for ImageData), ink[256] (what to write on it)}
function table(stops) {
  const labs = stops.map(toLab);
  const out = { css: [], words: new Uint32Array(STEPS), ink: [] };
  for (let k = 0; k < STEPS; k++) {
    const at = (k / (STEPS - 1)) * (labs.length - 1);
    const low = Math.min(labs.length - 2, Math.floor(at));
    const lab = labs[low].map((v, c) => v + (labs[low + 1][c] - v) * (at - low));
    const [r, g, b] = toBytes(lab);
    out.css.push(`rgb(${r} ${g} ${b})`);
    out.words[k] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    out.ink.push(luminance(r, g, b) > MIDDLE ? "#000" : "#fff");
  }
  return out;
}

const tables = new Map();

export function colours(kind, theme) {
  const key = `${theme} ${kind}`;
  if (!tables.has(key)) tables.set(key, table(STOPS[theme][kind]));
  return tables.get(key);
}

// Where a value stands on a scale, 0..255; -1 without data.
export class Scale {
  constructor(kind, low, high) {
    Object.assign(this, { kind, low, high });
    this.logLow = Math.log(low);
    this.factor = (STEPS - 1) / (Math.log(high) - this.logLow);
  }

  index(value) {
    if (!(value >= 0)) return -1;
    if (value <= this.low) return 0;
    if (value >= this.high) return STEPS - 1;
    return Math.round((Math.log(value) - this.logLow) * this.factor);
  }

  // Round values for the legend.
  ticks() {
    if (this.kind === "ratio") return [0.125, 0.25, 0.5, 1, 2, 4, 8].filter((t) => t >= this.low && t <= this.high);
    const out = [];
    for (let power = 10 ** Math.floor(Math.log10(this.low)); power <= this.high; power *= 10) {
      const wide = this.high / this.low > 300;
      for (const step of wide ? [1] : this.high / this.low > 30 ? [1, 3] : [1, 2, 5]) {
        if (step * power >= this.low && step * power <= this.high) out.push(step * power);
      }
    }
    return out;
  }
}

// From most of the values: low and high of a logarithmic scale.
export function amountScale(values) {
  const known = values.filter((value) => value > 0).sort();
  if (known.length === 0) return new Scale("amount", 1, 10);
  const low = known[Math.floor(0.01 * (known.length - 1))];
  const high = known[Math.ceil(0.998 * (known.length - 1))];
  return new Scale("amount", low / 1.15, Math.max(high * 1.3, low * 4));
}

export function ratioScale(wide) {
  return wide ? new Scale("ratio", 1 / 8, 8) : new Scale("ratio", 1 / 4, 4);
}

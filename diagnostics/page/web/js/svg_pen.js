// A pen that draws what the painters draw on a canvas as an SVG document: the part of a canvas's interface that they use.

const ANCHORS = { left: "start", center: "middle", right: "end" };
const DROPS = { alphabetic: 0, middle: 0.35 }; // of the font's size: viewers differ in dominant-baseline

export class SvgPen {
  ratio = 1;
  globalAlpha = 1;
  lineWidth = 1;
  fillStyle = "#000";
  strokeStyle = "#000";
  font = "12px sans-serif";
  textAlign = "left";
  textBaseline = "alphabetic";
  #width;
  #height;
  #parts = [];
  #path = "";
  #dashes = "";

  constructor(width, height) {
    [this.#width, this.#height] = [width, height];
  }

  toText() {
    const size = `width="${this.#width}" height="${this.#height}" viewBox="0 0 ${this.#width} ${this.#height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>\n${this.#parts.join("\n")}\n</svg>\n`;
  }

  beginPath() {
    this.#path = "";
  }

  moveTo(x, y) {
    this.#path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x, y) {
    this.#path += `L${round(x)} ${round(y)}`;
  }

  rect(x, y, width, height) {
    this.#path += `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}z`;
  }

  // Whole circles only.
  arc(x, y, radius) {
    const [r, d] = [round(radius), round(2 * radius)];
    this.#path += `M${round(x - radius)} ${round(y)}a${r} ${r} 0 1 0 ${d} 0a${r} ${r} 0 1 0 -${d} 0z`;
  }

  roundRect(x, y, width, height, radii) {
    const r = Math.max(0, Math.min(Array.isArray(radii) ? Math.max(...radii) : radii, width / 2, height / 2));
    const corner = (dx, dy) => `a${round(r)} ${round(r)} 0 0 1 ${round(dx)} ${round(dy)}`;
    const [w, h] = [round(width - 2 * r), round(height - 2 * r)];
    this.#path += `M${round(x + r)} ${round(y)}h${w}${corner(r, r)}v${h}${corner(-r, r)}h${-w}${corner(-r, -r)}v${-h}${corner(r, -r)}z`;
  }

  fill() {
    this.#add(`<path d="${this.#path}" fill="${attribute(this.fillStyle)}"`);
  }

  stroke() {
    this.#add(`<path d="${this.#path}" fill="none" stroke="${attribute(this.strokeStyle)}" stroke-width="${round(this.lineWidth)}"${this.#dashes}`);
  }

  fillRect(x, y, width, height) {
    this.#add(`<rect x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}" fill="${attribute(this.fillStyle)}"`);
  }

  strokeRect(x, y, width, height) {
    const path = this.#path;
    this.#path = "";
    this.rect(x, y, width, height);
    this.stroke();
    this.#path = path;
  }

  setLineDash(lengths) {
    this.#dashes = lengths.length ? ` stroke-dasharray="${lengths.map(round).join(" ")}"` : "";
  }

  fillText(text, x, y) {
    const [, weight, size] = /(?:(\d+) )?([\d.]+)px/.exec(this.font);
    const drop = round(y + DROPS[this.textBaseline] * size);
    const family = attribute(this.font.slice(this.font.indexOf("px ") + 3));
    const how = `font-family="${family}" font-size="${size}" font-weight="${weight ?? 400}" text-anchor="${ANCHORS[this.textAlign]}"`;
    this.#add(`<text x="${round(x)}" y="${drop}" ${how} fill="${attribute(this.fillStyle)}"`, `${attribute(String(text))}</text>`);
  }

  createImageData(width, height) {
    return new ImageData(width, height);
  }

  putImageData(image, x, y) {
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    canvas.getContext("2d").putImageData(image, 0, 0);
    this.#add(`<image x="${round(x)}" y="${round(y)}" width="${image.width}" height="${image.height}" href="${canvas.toDataURL()}"`);
  }

  #add(start, rest = "") {
    const alpha = this.globalAlpha < 1 ? ` opacity="${round(this.globalAlpha)}"` : "";
    this.#parts.push(`${start}${alpha}${rest ? `>${rest}` : "/>"}`);
  }
}

function round(value) {
  return Math.round(value * 100) / 100;
}

function attribute(text) {
  return text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

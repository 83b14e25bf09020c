// Where ranks lie along one side of the matrix, in device pixels: gaps between cells, wider gaps between nodes.

export class Axis {
  // ranks first..last (inclusive) between `from` and `from + size`. nodes: node of each rank.
  constructor(first, last, from, size, nodes) {
    const count = last - first + 1;
    const borders = [];
    for (let k = first + 1; k <= last; k++) borders.push(nodes[k] !== nodes[k - 1]);
    const numBorders = borders.filter(Boolean).length;
    const rough = size / count;
    this.gap = rough >= 26 ? 2 : rough >= 9 ? 1 : 0;
    this.nodeGap = numBorders === 0 ? this.gap : Math.max(this.gap + 1, Math.min(Math.round(rough * 0.16) + 1, 8));
    if (numBorders > size / 5 || rough < 1.5) this.nodeGap = this.gap; // they would be uneven, or all there is
    const free = size - numBorders * this.nodeGap - (count - 1 - numBorders) * this.gap;
    Object.assign(this, { first, last, count, from, size, nodes, cell: free / count });
    this.starts = new Int32Array(count);
    this.ends = new Int32Array(count);
    let gaps = 0;
    for (let k = 0; k < count; k++) {
      if (k > 0) gaps += borders[k - 1] ? this.nodeGap : this.gap;
      this.starts[k] = Math.round(from + k * this.cell + gaps);
      this.ends[k] = Math.max(this.starts[k] + 1, Math.round(from + (k + 1) * this.cell + gaps));
    }
  }

  start(rank) {
    return this.starts[rank - this.first];
  }

  end(rank) {
    return this.ends[rank - this.first];
  }

  middle(rank) {
    return (this.start(rank) + this.end(rank)) / 2;
  }

  has(rank) {
    return rank >= this.first && rank <= this.last;
  }

  // The rank at a position, a gap belonging to the cell before it; -1 outside.
  at(position) {
    if (position < this.from || position >= this.from + this.size) return -1;
    let [low, high] = [0, this.count - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return this.first + low;
  }

  // position -> index among the visible ranks, -1 in gaps: for painting pixel by pixel.
  pixels() {
    const out = new Int16Array(Math.ceil(this.size)).fill(-1);
    for (let k = 0; k < this.count; k++) out.fill(k, this.starts[k] - this.from, this.ends[k] - this.from);
    return out;
  }

  // Ranks whose numbers are written: as many as fit with `room` pixels each, at round steps.
  labels(room) {
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((s) => s * (this.size / this.count) >= room) ?? 512;
    const out = [];
    for (let rank = Math.ceil(this.first / step) * step; rank <= this.last; rank += step) out.push(rank);
    return out;
  }

  // Nodes in view: {node, start, end}.
  blocks() {
    const out = [];
    for (let rank = this.first; rank <= this.last; rank++) {
      const node = this.nodes[rank];
      const last = out.at(-1);
      if (last && last.node === node) Object.assign(last, { end: this.end(rank), last: rank });
      else out.push({ node, start: this.start(rank), end: this.end(rank), first: rank, last: rank });
    }
    return out;
  }
}

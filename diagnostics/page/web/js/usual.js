// Usual values: medians per tier of what is there now, or each link's own before. Links inside nodes and links between nodes are never compared with each other.

export function median(values) {
  const known = Float64Array.from(values).filter(Number.isFinite).sort();
  if (known.length === 0) return NaN;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}

// {inside, between}: medians over the links inside nodes and between nodes. own: does the diagonal count?
export function usualOf(values, n, nodes, own) {
  const inside = [];
  const between = [];
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) {
      if (i === j && !own) continue;
      const value = values[i * n + j];
      if (Number.isFinite(value)) (nodes[i] === nodes[j] ? inside : between).push(value);
    }
  }
  return { inside: median(inside), between: median(between) };
}

// Values over the usual value of their tier; NaN where it is 0 or unknown.
export function ratios(values, n, nodes, own) {
  const usual = usualOf(values, n, nodes, own);
  const out = new Float32Array(n * n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) {
      const base = nodes[i] === nodes[j] ? usual.inside : usual.between;
      out[i * n + j] = base > 0 && (own || i !== j) ? values[i * n + j] / base : NaN;
    }
  }
  return out;
}

// Values over those of another matrix; NaN where that is 0 or unknown.
export function ratiosTo(values, before) {
  return values.map((value, k) => (before[k] > 0 ? value / before[k] : NaN));
}

// Averages over the other ranks: {rows, columns}.
export function margins(values, n, own) {
  const [rows, columns, rowCount, columnCount] = [0, 0, 0, 0].map(() => new Float64Array(n));
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) {
      const value = values[i * n + j];
      if ((i === j && !own) || !Number.isFinite(value)) continue;
      rows[i] += value;
      columns[j] += value;
      rowCount[i]++;
      columnCount[j]++;
    }
  }
  return { rows: rows.map((v, k) => v / rowCount[k]), columns: columns.map((v, k) => v / columnCount[k]) };
}

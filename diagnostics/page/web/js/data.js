// Fetching: documents, packed matrices (a line of JSON, then float32), and the stream of changes.

const MOST_WINDOWS_KEPT = 24; // a window of 256 ranks takes 0.8 MB

export async function getJson(path) {
  return (await request(path)).json();
}

// {header, floats}: everything after the first line, as one array.
export async function getPacked(path) {
  const buffer = await (await request(path)).arrayBuffer();
  const bytes = new Uint8Array(buffer);
  const end = bytes.indexOf(10);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  return { header, floats: new Float32Array(buffer, end + 1) };
}

async function request(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`${path}: ${reply.status} ${reply.statusText}`);
  return reply;
}

// The matrices of one window. number: of the window, or "all".
export class WindowData {
  constructor({ header, floats }) {
    const n = header.num_ranks;
    Object.assign(this, { n, number: header.window, start: header.t_start, end: header.t_end });
    [this.dispatch, this.combine, this.tokens] = [0, 1, 2].map((p) => floats.subarray(p * n * n, (p + 1) * n * n));
    this.compute = floats.subarray(3 * n * n, 3 * n * n + n);
    this.calls = floats.subarray(3 * n * n + n, 3 * n * n + 2 * n);
    this.wait = this.dispatch.map((value, k) => value + this.combine[k]);
  }
}

// What was usual before: each link's own.
export class PastData {
  constructor({ header, floats }) {
    const n = header.num_ranks;
    Object.assign(this, { n, source: header.source });
    [this.dispatch, this.combine, this.tokens] = [0, 1, 2].map((p) => floats.subarray(p * n * n, (p + 1) * n * n));
    this.compute = floats.subarray(3 * n * n, 3 * n * n + n);
    this.received = floats.subarray(3 * n * n + n, 3 * n * n + 2 * n);
    this.wait = this.dispatch.map((value, k) => value + this.combine[k]);
  }
}

export async function getPast() {
  return new PastData(await getPacked("api/usual"));
}

// Sends a change. The error has the server's reason.
export async function post(path, fields, key) {
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(fields) });
  if (reply.ok) return;
  const text = await reply.text();
  let reason = text.trim() || `${reply.status} ${reply.statusText}`;
  try {
    reason = JSON.parse(text).error.message;
  } catch {
    // a proxy's page, or plain text
  }
  throw new Error(reason);
}

const kept = new Map();

export async function getWindow(number, { fresh = false } = {}) {
  const key = String(number);
  if (fresh) kept.delete(key);
  if (!kept.has(key)) {
    kept.set(key, getPacked(`api/windows/${key}`).then((packed) => new WindowData(packed)));
    kept.get(key).catch(() => kept.delete(key));
    for (const old of kept.keys()) {
      if (kept.size <= MOST_WINDOWS_KEPT) break;
      if (old !== "all" && old !== key) kept.delete(old);
    }
  } else {
    const value = kept.get(key); // the most recently used last
    kept.delete(key);
    kept.set(key, value);
  }
  return kept.get(key);
}

// Window numbers begin anew with another run.
export function forgetWindows() {
  kept.clear();
}

// Calls onState with every change, onLink(false) while the server cannot be reached.
export function watch(onState, onLink) {
  const events = new EventSource("api/events");
  events.onmessage = (event) => {
    onLink(true);
    onState(JSON.parse(event.data));
  };
  events.onerror = () => onLink(false);
}

// What the page shows, in one place. Views subscribe; many changes within one turn reach them once.

export class Store {
  #values;
  #views = [];
  #changed = new Set();

  constructor(values) {
    this.#values = values;
  }

  get(name) {
    return this.#values[name];
  }

  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (Object.is(this.#values[name], value)) continue;
      this.#values[name] = value;
      if (this.#changed.size === 0) queueMicrotask(() => this.#tell());
      this.#changed.add(name);
    }
  }

  // Runs view() now, and whenever one of the names changes.
  on(names, view) {
    this.#views.push([names.split(" "), view]);
    view();
  }

  #tell() {
    const changed = this.#changed;
    this.#changed = new Set();
    for (const [names, view] of this.#views) {
      if (names.some((name) => changed.has(name))) view();
    }
  }
}

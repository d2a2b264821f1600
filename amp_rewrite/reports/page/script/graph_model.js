/** Kinds of change, each with its sign and color. */
const CHANGES = [
  ["lowered", "▼", "low"], ["raised", "▲", "high"], ["retyped", "◆", "rule3"], ["attribute", "≠", "rule2"],
  ["added", "+", "only"],
];

/** Navigation in a graph's columns. Parts are numbered: vertices first, then scopes. */
class GraphModel {
  constructor(G) {
    this.G = G;
    Object.assign(this, { ops: G.ops, scopes: G.scopes, casts: G.casts, words: G.words, rules: G.rules, rows: G.rows });
    const { ops, scopes } = G, number = (this.number = ops.op.length);
    this.parts = scopes.name.map(() => []);
    for (let v = 0; v < number; v++) if (this.drawn(v)) this.parts[ops.scope[v]].push(v);
    for (let s = 1; s < scopes.name.length; s++) if (scopes.place[2 * s] >= 0) this.parts[scopes.parent[s]].push(number + s);
    for (const inside of this.parts) inside.sort((a, b) => this.layerOf(a) - this.layerOf(b) || this.orderOf(a) - this.orderOf(b));
    this.readers = Array.from({ length: number }, () => null);
    ops.reads.forEach((reads, v) => reads.forEach((producer) => {
      if (producer >= 0) (this.readers[producer] || (this.readers[producer] = [])).push(v);
    }));
    this.castsOn = new Map();
    G.casts.forEach((cast, c) => {
      for (let i = 0; i < cast.edges.length; i += 2) {
        const key = cast.edges[i] * number + cast.edges[i + 1];
        if (this.castsOn.has(key)) this.castsOn.get(key).push(c); else this.castsOn.set(key, [c]);
      }
    });
    this.changes = new Map();
    if (G.changes) G.changes.vertex.forEach((v, c) => (this.changes.get(v) || this.changes.set(v, []).get(v)).push(c));
    this.changedIn = scopes.name.map(() => 0);
    for (const v of this.changes.keys()) if (this.drawn(v)) this.changedIn[ops.scope[v]]++;
    for (let s = scopes.name.length - 1; s > 0; s--) this.changedIn[scopes.parent[s]] += this.changedIn[s];
    this.open = new Set([0]);
    this.top = new Int32Array(scopes.name.length);
    this.color();
  }
  word(column, v) { return this.words[this.ops[column][v]]; }
  nameOf(v) { return this.words[this.ops.prefix[v]] + this.ops.name[v]; }
  drawn(v) { return this.ops.place[2 * v] >= 0; }
  layerOf(p) { return p < this.number ? this.ops.place[2 * p] : this.scopes.place[2 * (p - this.number)]; }
  orderOf(p) { return p < this.number ? this.ops.place[2 * p + 1] : this.scopes.place[2 * (p - this.number) + 1]; }
  scopeOf(p) { return p < this.number ? this.ops.scope[p] : this.scopes.parent[p - this.number]; }
  isOpen(p) { return p >= this.number && this.open.has(p - this.number); }
  /** Return a part and its enclosing scopes, the innermost first. */
  chain(p) { const all = [p]; for (let s = this.scopeOf(p); s >= 0; s = this.scopes.parent[s]) all.push(this.number + s); return all; }

  // -- words ---------------------------------------------------------------------------------------
  label(p) { return p < this.number ? this.word("op", p) : this.scopes.name[p - this.number]; }
  /** Return the sign of a vertex's first change; "" for an unchanged vertex. */
  sign(p) {
    const at = p < this.number ? this.changeOf(p) : CHANGES.length;
    return at < CHANGES.length ? CHANGES[at][1] : "";
  }
  below(p) {
    if (p >= this.number) {
      const changed = this.changedIn[p - this.number];
      return plural(this.size(p - this.number), "op") + (changed ? ` · ${changed} changed` : "");
    }
    return this.ops.name[p] === this.label(p) ? "" : this.ops.name[p];
  }
  describe(p) {
    if (p >= this.number) return `scope ${this.label(p)}, ${this.below(p)}, ${this.isOpen(p) ? "expanded" : "collapsed"}`;
    const rule = this.word("rule", p), changes = (this.changes.get(p) || []).map((c) => this.changeWords(c));
    return [`${this.label(p)} ${this.nameOf(p)}`, this.word("dtype", p), rule, ...changes].filter(Boolean).join(", ");
  }
  /** Describe a change: "lowered: float32 → float16 (T)". */
  changeWords(c) {
    const { kind, of, before, after } = this.G.changes, word = (column) => this.words[column[c]];
    const types = [word(before), word(after)].filter(Boolean).join(" → ");
    return `${word(kind)}: ${types}${word(of) ? ` (${word(of)})` : ""}`;
  }
  casting(cast) { return `${cast.from} → ${cast.to}${cast.bytes !== undefined ? `, ${bytes(cast.bytes)} moved` : ", size unknown"}`; }

  // -- colors --------------------------------------------------------------------------------------
  /** Return the index of a vertex's first kind of change in CHANGES; CHANGES.length for an unchanged vertex. */
  changeOf(v) {
    const first = this.changes.get(v);
    return first ? CHANGES.findIndex(([kind]) => kind === this.words[this.G.changes.kind[first[0]]]) : CHANGES.length;
  }
  /** Return the coloring by change or by type: the class of each vertex, and the names and colors of the classes. */
  coloring() {
    const { G, ops, words } = this;
    if (G.changes) return {
      of: (v) => this.changeOf(v),
      names: [...CHANGES.map(([kind, sign]) => `${sign} ${kind}`), "unchanged"],
      colors: [...CHANGES.map(([, , color]) => color), "muted"],
      ports: true,
    };
    const low = [...new Set(ops.dtype)].map((w) => words[w]).filter((w) => LOW_TYPE.test(w)).join(", ") || "low";
    return { of: (v) => ops.side[v], names: [low, "float32 and wider", "no floats"], colors: ["low", "high", "muted"] };
  }
  /** Count the classes in each scope. */
  color() {
    const mode = (this.mode = this.coloring()), { ops, scopes, number } = this;
    this.classes = new Uint8Array(number);
    this.shares = scopes.name.map(() => new Array(mode.names.length).fill(0));
    this.sizes = scopes.name.map(() => 0);
    for (let v = 0; v < number; v++) {
      this.classes[v] = mode.of(v);
      if (!this.drawn(v)) continue;
      if (v < this.rows) this.sizes[ops.scope[v]]++;
      if (v < this.rows || mode.ports) this.shares[ops.scope[v]][this.classes[v]]++;
    }
    for (let s = scopes.name.length - 1; s > 0; s--) {
      this.sizes[scopes.parent[s]] += this.sizes[s];
      this.shares[s].forEach((n, i) => { this.shares[scopes.parent[s]][i] += n; });
    }
  }
  size(s) { return this.sizes[s]; }

  // -- collapsing ----------------------------------------------------------------------------------
  collapse() {
    this.top[0] = -1;
    for (let s = 1; s < this.top.length; s++) {
      const above = this.top[this.scopes.parent[s]];
      this.top[s] = above !== -1 ? above : this.open.has(s) ? -1 : s;
    }
  }
  shownAs(v) { const top = this.top[this.ops.scope[v]]; return top === -1 ? v : this.number + top; }
  /** Open the scopes around a vertex; return true if any was collapsed. */
  openAround(v) {
    let changed = false;
    for (let s = this.ops.scope[v]; s > 0; s = this.scopes.parent[s]) if (!this.open.has(s)) { this.open.add(s); changed = true; }
    return changed;
  }
  /** Expand the eligible scopes, the smallest first, up to `limit` parts in total; always show at least eight. */
  expandUpTo(limit, eligible = () => true) {
    const { number } = this, size = (p) => this.parts[p - number].length;
    const shown = [number];
    for (let i = 0; i < shown.length; i++) if (this.isOpen(shown[i])) shown.push(...this.parts[shown[i] - number]);
    let closed = shown.filter((p) => p >= number && !this.isOpen(p) && eligible(p - number)), drawn = shown.length;
    while (closed.length) {
      const smallest = closed.reduce((a, b) => (size(b) < size(a) ? b : a));
      if (drawn > 8 && drawn + size(smallest) > limit) break;
      this.open.add(smallest - number);
      drawn += size(smallest);
      closed = closed.filter((p) => p !== smallest).concat(this.parts[smallest - number].filter((p) => p >= number && eligible(p - number)));
    }
  }
  /** Collapse all scopes, or expand them from the outside up to `limit` parts; return true if all are expanded. */
  openAll(expand, limit) {
    this.open.clear();
    this.open.add(0);
    if (!expand) return true;
    let shown = this.parts[0].length, s = 1;
    for (; s < this.top.length && shown < limit; s++) if (this.open.has(this.scopes.parent[s])) { this.open.add(s); shown += this.parts[s].length; }
    return shown < limit;
  }
  /** Return the edges between visible parts, with their Casts. */
  edgesShown() {
    const shown = new Map(), { number } = this;
    for (let v = 0; v < number; v++) {
      if (!this.drawn(v)) continue;
      const reader = this.shownAs(v);
      for (const producer of this.ops.reads[v]) {
        if (producer < 0 || !this.drawn(producer)) continue;
        const source = this.shownAs(producer);
        if (source === reader) continue;
        const key = source * (number + this.top.length) + reader;
        let edge = shown.get(key);
        if (!edge) shown.set(key, (edge = { source, reader, n: 0, casts: new Set() }));
        edge.n++;
        for (const c of this.castsOn.get(producer * number + v) || []) edge.casts.add(c);
      }
    }
    return [...shown.values()];
  }
}

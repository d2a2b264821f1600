/** Graphs beside each other with one toolbar. Ops and scopes of the same number in their columns `link` belong
 * together: what a reader chooses or folds in one graph, the others show and fold, too. */
class Board {
  static FEW = 48; static CHANGED = 120; static MANY = 2500;
  constructor(host, given) {
    const graphs = given.graphs ? given.graphs.map((graph) => ({ ...given, ...graph })) : [given];
    this.host = host;
    this.linked = graphs.length > 1;
    this.said = make("p", { class: "said", role: "status", "aria-live": "polite" });
    this.views = graphs.map((G, at) => new GraphView(G, this, at));
    const places = (column) => {
      const found = new Map();
      if (this.linked) graphs.forEach((G, at) => column(G).forEach((link, place) => {
        if (link >= 0) (found.get(link) || found.set(link, new Map()).get(link)).set(at, place);
      }));
      return found;
    };
    this.twins = places((G) => G.link);
    this.twinScopes = places((G) => G.scopes.link);
    this.changed = this.changes();
    this.casts = this.views.flatMap((view) => view.M.casts.map((cast, c) => [view, c]));
    const alone = this.casts.filter(([view, c]) => view.M.casts[c].sign);
    this.visited = alone.length ? alone : this.casts;
    this.castAt = this.changeAt = -1;
    this.hits = [];
    this.hitAt = -1;
    this.build();
    this.unfold();
    this.each((view) => view.draw());
    this.fit(false);
    let width = host.clientWidth;
    addEventListener("resize", () => { if (host.clientWidth !== width) { width = host.clientWidth; this.fit(false); } });
    if (this.changed.length) this.point(this.changed[0], false);
    this.linkRows();
  }
  each(act) { this.views.forEach(act); }
  /** Show all graphs at one scale, from their top. */
  fit(whole) {
    const k = Math.min(...this.views.map((view) => view.scale(whole)));
    this.each((view) => view.fit(k));
  }

  // -- linked graphs -------------------------------------------------------------------------------
  /** Return the changed ops, each by its graph and vertex; one that all graphs have stands once, by the last of them. */
  changes() {
    const found = [], seen = new Set();
    for (const view of [...this.views].reverse()) {
      for (const v of [...view.M.changes.keys()].filter((v) => view.M.drawn(v)).sort((a, b) => a - b)) {
        const link = this.linked ? view.M.G.link[v] : -1;
        if (link >= 0 && seen.has(link)) continue;
        if (link >= 0) seen.add(link);
        found.push([view, v]);
      }
    }
    return found.sort(([a, v], [b, u]) => v / a.M.number - u / b.M.number);
  }
  /** Yield the other graphs, each with the vertex or scope there that belongs to one here. */
  *others(view, twins, link, place) {
    const known = link >= 0 ? twins.get(link) : undefined;
    for (const other of this.views) if (other !== view) yield [other, known ? known.get(other.at) : undefined];
  }
  twinsOf(view, v) { return this.linked ? this.others(view, this.twins, view.M.G.link[v]) : []; }
  chose(view, v) {
    this.last = view;
    const said = this.said.textContent;
    for (const [other, twin] of this.twinsOf(view, v)) {
      if (twin === undefined) { other.details.clear("This op is not in this model."); continue; }
      const target = other.reveal(twin);
      other.details.showOp(twin);
      other.center(target);
    }
    this.said.textContent = said;
  }
  toggled(view, s, opened) {
    this.said.textContent = `${opened ? "unfolded" : "folded"} ${view.M.scopes.name[s]}`;
    if (!this.linked) return;
    for (const [other, twin] of this.others(view, this.twinScopes, view.M.scopes.link[s])) {
      if (twin === undefined || other.M.open.has(twin) === opened) continue;
      if (opened) other.M.openAround(other.M.parts[twin].find((p) => p < other.M.number) ?? -1);
      other.turn(twin, opened);
      other.sight(other.M.number + twin);
    }
  }
  /** Unfold the paths to what changed, then small scopes; linked scopes together. */
  unfold() {
    this.each(({ M }) => {
      if (M.changes.size) M.unfoldUpTo(Board.CHANGED, (s) => M.changedIn[s] > 0);
      M.unfoldUpTo(Board.FEW);
    });
    this.share();
  }
  share() {
    for (const places of this.twinScopes.values()) {
      const opened = [...places].some(([at, s]) => this.views[at].M.open.has(s));
      for (const [at, s] of places) if (opened) this.views[at].M.open.add(s);
    }
  }
  /** Show a place in its graph and in the others; `choose`: show its details, too. */
  point([view, v], choose) {
    if (choose) { view.goTo(v); return; }
    const target = view.reveal(v);
    view.sight(target);
    for (const [other, twin] of this.twinsOf(view, v)) if (twin !== undefined) other.sight(other.reveal(twin));
  }
  close() { return this.views.map((view) => view.details.clear()).some(Boolean); }

  // -- turns ---------------------------------------------------------------------------------------
  nextCast(step) {
    const number = this.visited.length;
    if (!number) { this.said.textContent = "no Casts"; return; }
    this.castAt = (Math.max(this.castAt, step < 0 ? 0 : -1) + step + number) % number;
    this.showCast(...this.visited[this.castAt]);
    this.said.textContent += ` (${this.castAt + 1} of ${number})`;
  }
  showCast(view, c) {
    const { edges } = view.M.casts[c];
    if (edges.length) {
      view.reveal(edges[0]);
      const target = view.reveal(edges[1]);
      view.chosen = target;
      view.mark();
      view.center(target);
      for (const [other, twin] of this.twinsOf(view, edges[1])) if (twin !== undefined) other.center(other.reveal(twin));
    }
    view.details.showCasts([c]);
  }
  nextChange(step) {
    const number = this.changed.length;
    this.changeAt = (Math.max(this.changeAt, step < 0 ? 0 : -1) + step + number) % number;
    this.point(this.changed[this.changeAt], true);
    this.said.textContent += ` (${this.changeAt + 1} of ${number})`;
  }

  // -- search --------------------------------------------------------------------------------------
  look() {
    const text = this.search.value.trim().toLowerCase(), seen = new Set();
    this.hits = [];
    this.hitAt = -1;
    for (const view of text ? [...this.views].reverse() : []) {
      const { M } = view, like = M.words.map((w) => w.toLowerCase().includes(text));
      for (let v = 0; v < M.number; v++) {
        if (like[M.ops.op[v]] || M.nameOf(v).toLowerCase().includes(text)) this.hits.push([view.at, v]);
      }
    }
    this.turns = this.hits.filter(([at, v]) => {
      const link = this.linked ? this.views[at].M.G.link[v] : -1, first = link < 0 || !seen.has(link);
      seen.add(link);
      return first;
    });
    this.found.textContent = text ? plural(this.turns.length, "hit") : "";
    this.tables.forEach((table) => table.refresh());
  }
  searching(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      clearTimeout(this.pause);
      if (!this.hits.length || this.search.dataset.last !== this.search.value) this.look();
      this.search.dataset.last = this.search.value;
      const number = this.turns.length;
      if (number) {
        this.hitAt = (event.shiftKey ? Math.max(this.hitAt, 0) - 1 + number : this.hitAt + 1) % number;
        const [at, v] = this.turns[this.hitAt];
        this.views[at].goTo(v);
        this.found.textContent = `${this.hitAt + 1} of ${number}`;
      }
    } else if (event.key === "Escape") {
      this.search.value = "";
      this.look();
      (this.last || this.views[0]).back();
      event.stopPropagation();
    }
  }

  // -- the parts of the page -----------------------------------------------------------------------
  build() {
    const { views, linked } = this;
    this.search = make("input", { type: "search", placeholder: "name or type", "aria-label": "Search ops by name or type", size: 18 });
    this.found = make("span", { class: "found", "aria-live": "polite" });
    this.search.addEventListener("input", () => { clearTimeout(this.pause); this.pause = setTimeout(() => this.look(), 120); });
    this.search.addEventListener("keydown", (event) => this.searching(event));
    const modes = Object.assign({}, ...views.map((view) => view.M.modes));
    const choice = make("select", { "aria-label": "Color ops by", onchange: () => this.each((view) => { view.M.color(choice.value); view.draw(); view.show(); }) },
      ...Object.entries(modes).map(([name, mode]) => make("option", { value: name }, mode.title)));
    const all = (unfold) => {
      const opened = views.map((view) => view.M.openAll(unfold, Board.MANY));
      if (!opened.every(Boolean)) this.said.textContent = "too many ops to unfold all at once: the first scopes are open";
      this.each((view) => view.draw());
      this.fit(false);
    };
    const toolbar = make("div", { class: "toolbar", role: "toolbar", "aria-label": "Graph" },
      this.search, this.found, make("label", {}, "color by ", choice),
      this.changed.length ? button("next change", "Go to the next change", () => this.nextChange(1)) : null,
      button("next Cast", "Go to the next Cast", () => this.nextCast(1)),
      button("unfold all", "Unfold all scopes", () => all(true)), button("fold all", "Fold all scopes", () => all(false)),
      button("+", "Zoom in", () => this.each((view) => view.zoom(1.25))), button("−", "Zoom out", () => this.each((view) => view.zoom(0.8))),
      button("fit", "Fit the graph", () => this.fit(true)));
    const hits = () => (this.search.value.trim() ? this.hits : null);
    const of = (view) => (linked ? ` of ${view.M.G.title}` : "");
    this.tables = views.map((view) => new OpsTable(view, `Ops${of(view)} as a table`, hits));
    const panes = views.map((view) => make("div", { class: "pane", role: "group", "aria-label": view.M.G.title || "Graph", "data-graph": view.at },
      linked ? make("h3", { class: "part" }, view.M.G.title) : null, view.keys, make("div", { class: "stage" }, view.frame, view.details.box)));
    const casts = views.map((view) => castTable(view, `Casts${of(view)} as a table`, (c) => this.showCast(view, c)));
    this.host.replaceChildren(toolbar, make("div", { class: linked ? "panes linked" : "panes" }, ...panes), this.said,
      ...views.flatMap((view, at) => [this.tables[at].box, casts[at]]));
  }
  /** Let rows of other figures lead to their op: `data-at` holds the number of a graph and of a vertex. */
  linkRows() {
    for (const row of document.querySelectorAll(`[data-board="${this.host.id}"] [data-at]`)) {
      const [at, v] = row.dataset.at.split(" ").map(Number), cell = row.querySelector("[data-op]");
      const go = () => { this.views[at].goTo(v); this.host.scrollIntoView({ block: "start" }); };
      cell.replaceChildren(make("button", { class: "link", onclick: go }, cell.textContent));
    }
  }
}

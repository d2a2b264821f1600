/** A graph with its toolbar and details. */
class Board {
  static MAX_PARTS = 48; static MAX_CHANGED_PARTS = 120; static MAX_EXPANDED = 2500;
  constructor(host, G) {
    this.host = host;
    this.status = make("p", { class: "status", role: "status", "aria-live": "polite" });
    const view = (this.view = new GraphView(G, this)), M = (this.M = view.M);
    this.changed = [...M.changes.keys()].filter((v) => M.drawn(v)).sort((a, b) => a - b);
    const all = M.casts.map((_, c) => c), added = all.filter((c) => M.casts[c].sign);
    this.visited = added.length ? added : all;
    this.castAt = this.changeAt = this.hitAt = -1;
    this.hits = [];
    this.build();
    if (M.changes.size) M.expandUpTo(Board.MAX_CHANGED_PARTS, (s) => M.changedIn[s] > 0);
    M.expandUpTo(Board.MAX_PARTS);
    view.draw();
    view.fit(false);
    let width = host.clientWidth;
    addEventListener("resize", () => { if (host.clientWidth !== width) { width = host.clientWidth; view.fit(false); } });
    if (this.changed.length) view.ensureVisible(view.reveal(this.changed[0]));
    for (const cell of document.querySelectorAll("[data-vertex]")) { // rows of other figures link to their op
      const go = () => { view.goTo(Number(cell.dataset.vertex)); host.scrollIntoView({ block: "start" }); };
      cell.replaceChildren(make("button", { class: "link", onclick: go }, cell.textContent));
    }
  }

  // -- steps through Casts and changes -------------------------------------------------------------
  nextCast(step) {
    const number = this.visited.length;
    if (!number) { this.status.textContent = "no Casts"; return; }
    this.castAt = (Math.max(this.castAt, step < 0 ? 0 : -1) + step + number) % number;
    this.showCast(this.visited[this.castAt]);
    this.status.textContent += ` (${this.castAt + 1} of ${number})`;
  }
  showCast(c) {
    const { view } = this, { edges } = this.M.casts[c];
    if (edges.length) {
      view.reveal(edges[0]);
      const target = view.reveal(edges[1]);
      view.chosen = target;
      view.mark();
      view.center(target);
    }
    view.details.showCasts([c]);
  }
  nextChange(step) {
    const number = this.changed.length;
    this.changeAt = (Math.max(this.changeAt, step < 0 ? 0 : -1) + step + number) % number;
    this.view.goTo(this.changed[this.changeAt]);
    this.status.textContent += ` (${this.changeAt + 1} of ${number})`;
  }

  // -- search --------------------------------------------------------------------------------------
  find() {
    const { M } = this, text = this.search.value.trim().toLowerCase();
    const like = M.words.map((w) => w.toLowerCase().includes(text));
    this.hits = [];
    this.hitAt = -1;
    for (let v = 0; text && v < M.number; v++) {
      if (like[M.ops.op[v]] || M.nameOf(v).toLowerCase().includes(text)) this.hits.push(v);
    }
    this.found.textContent = text ? plural(this.hits.length, "match", "matches") : "";
  }
  pressInSearch(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      clearTimeout(this.pause);
      if (!this.hits.length || this.search.dataset.last !== this.search.value) this.find();
      this.search.dataset.last = this.search.value;
      const number = this.hits.length;
      if (number) {
        this.hitAt = event.shiftKey ? (Math.max(this.hitAt, 0) - 1 + number) % number : (this.hitAt + 1) % number;
        this.view.goTo(this.hits[this.hitAt]);
        this.found.textContent = `${this.hitAt + 1} of ${number}`;
      }
    } else if (event.key === "Escape") {
      this.search.value = "";
      this.find();
      this.view.back();
      event.stopPropagation();
    }
  }

  // -- the parts of the page -----------------------------------------------------------------------
  build() {
    const { view, M } = this;
    this.search = make("input", { type: "search", placeholder: "name or type", "aria-label": "Search ops by name or type", size: 18 });
    this.found = make("span", { class: "found", "aria-live": "polite" });
    this.search.addEventListener("input", () => { clearTimeout(this.pause); this.pause = setTimeout(() => this.find(), 120); });
    this.search.addEventListener("keydown", (event) => this.pressInSearch(event));
    const all = (expand) => {
      if (!M.openAll(expand, Board.MAX_EXPANDED)) this.status.textContent = "too many ops to expand all at once; only the first scopes are expanded";
      view.draw();
      view.fit(false);
    };
    const toolbar = make("div", { class: "toolbar", role: "toolbar", "aria-label": "Graph" },
      this.search, this.found,
      this.changed.length ? button("next change", "Go to the next change", () => this.nextChange(1)) : null,
      button("next Cast", "Go to the next Cast", () => this.nextCast(1)),
      button("expand all", "Expand all scopes", () => all(true)), button("collapse all", "Collapse all scopes", () => all(false)),
      button("+", "Zoom in", () => view.zoom(1.25)), button("−", "Zoom out", () => view.zoom(0.8)),
      button("fit", "Fit the graph", () => view.fit(true)));
    const pane = make("div", { role: "group", "aria-label": "Graph" }, view.keys, make("div", { class: "stage" }, view.frame, view.details.box));
    this.host.replaceChildren(toolbar, pane, this.status);
  }
}

const data = JSON.parse(document.getElementById("data").textContent), host = document.getElementById("graph-board");
if (host) new Board(host, data.graph);

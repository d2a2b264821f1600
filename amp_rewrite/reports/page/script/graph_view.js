/** The interactive drawing of a graph, with panning, zooming and keyboard control.
 * `board` provides the search, and steps through Casts and changes. */
class GraphView {
  constructor(G, board) {
    this.M = new GraphModel(G);
    this.board = board;
    this.layout = new GraphLayout(this.M);
    this.nodes = new Map();
    this.edges = [];
    this.current = this.chosen = null;
    this.total = { w: 1, h: 1 };
    this.view = { x: 0, y: 0, k: 1 };
    this.world = make("g", {});
    this.canvas = make("svg", { role: "group", class: "canvas", "aria-label": "Graph of ops. Arrows move along edges, Enter opens, Escape closes." }, this.world);
    this.frame = make("div", { class: "frame-box" }, this.canvas);
    this.keys = make("p", { class: "legend" });
    this.details = new Details(this);
    this.listen();
  }

  // -- drawing -------------------------------------------------------------------------------------
  bar(box) {
    const counts = this.M.shares[box.p - this.M.number], whole = counts.reduce((a, b) => a + b, 0) || 1;
    const g = make("g", {});
    let x = box.x + 10;
    counts.forEach((n, i) => {
      const w = ((box.w - 20) * n) / whole;
      if (n) g.append(make("rect", { x, y: box.y + box.h - 9, width: w, height: 4, class: this.M.mode.colors[i] }));
      x += w;
    });
    return g;
  }
  node(box) {
    const { M } = this, { p, x, y, w, h } = box;
    const isScope = p >= M.number, isOpen = M.isOpen(p), sign = M.sign(p);
    const kind = isOpen ? "frame" : isScope ? "scope" : p >= M.rows ? "port" : "op";
    const changed = sign ? ` changed${sign === "+" ? " alone" : ""}` : isScope && M.changedIn[p - M.number] ? " changed" : "";
    const g = make("g", {
      class: `node ${kind}${isScope ? "" : ` ${M.mode.colors[M.classes[p]]}`}${changed}`, role: "button", tabindex: "-1",
      "aria-label": M.describe(p), "aria-expanded": isScope ? String(isOpen) : null, "data-part": p,
    });
    g.append(make("rect", { x, y, width: w, height: h, rx: isOpen ? 8 : isScope ? 10 : 4, class: "box" }));
    const maxColumns = Math.floor((w - 16) / 6.6);
    if (isOpen) {
      g.append(make("text", { x: x + 12, y: y + 18, class: "head" }, `▾ ${cut(M.label(p), maxColumns - 6)}`));
    } else {
      const tag = p < M.number ? shortType(M.word("dtype", p)) : "▸", sub = cut(M.below(p), maxColumns);
      const head = cut(`${sign ? `${sign} ` : ""}${M.label(p)}`, Math.floor((w - 16) / 7.2) - tag.length - 1);
      g.append(make("text", { x: x + 9, y: sub ? y + 16 : y + h / 2 + 4, class: "head" }, head));
      g.append(make("text", { x: x + w - 8, y: y + 16, class: "tag" }, cut(tag, 8)));
      if (sub) g.append(make("text", { x: x + 9, y: y + 31, class: "sub" }, sub));
      if (isScope) g.append(this.bar(box));
    }
    g.append(make("title", {}, M.describe(p)));
    this.nodes.set(p, g);
    return g;
  }
  castMark(edge, at) {
    const all = [...edge.casts].map((c) => this.M.casts[c]);
    const known = all.every((c) => c.bytes !== undefined), moved = all.reduce((n, c) => n + (c.bytes || 0), 0);
    const signs = [...new Set(all.map((c) => c.sign || ""))].join("");
    const text = (signs ? `${signs} ` : "") + (all.length > 1 ? `${all.length} Casts` : `${shortType(all[0].from)}→${shortType(all[0].to)}`) + (known ? ` ${bytes(moved)}` : "");
    const w = text.length * 6.2 + 12;
    const g = make("g", { class: signs ? "castmark changed" : "castmark", "data-cast": [...edge.casts][0], role: "button", tabindex: "-1",
      "aria-label": `Cast: ${text}${signs ? ", new" : ""}`, onclick: () => this.details.showCasts([...edge.casts]) });
    g.append(make("rect", { x: at.x - w / 2, y: at.y - 8, width: w, height: 16, rx: 8 }),
      make("text", { x: at.x, y: at.y + 4 }, text), make("title", {}, all.map((c) => `${c.from} → ${c.to} of ${c.value}`).slice(0, 5).join("\n")));
    return g;
  }
  draw() {
    const { M, layout, nodes } = this;
    M.collapse();
    nodes.clear();
    this.total = layout.whole();
    this.frame.style.setProperty("--tall", `${Math.round(this.total.h + 60)}px`);
    const frames = make("g", {}), lines = make("g", { class: "edges" }), leaves = make("g", {}), marks = make("g", {});
    this.edges = M.edgesShown();
    this.edges.forEach((edge, turn) => {
      const at = layout.route(edge, turn);
      lines.append(make("path", { d: at.d, class: edge.casts.size ? "edge withcast" : "edge", "data-edge": `${edge.source} ${edge.reader}` }));
      if (edge.casts.size) marks.append(this.castMark(edge, at));
    });
    for (const box of layout.boxes.values()) if (box.p !== M.number) (box.rows ? frames : leaves).append(this.node(box));
    this.world.replaceChildren(frames, lines, leaves, marks);
    if (!nodes.has(this.current)) this.current = leaves.firstChild ? Number(leaves.firstChild.dataset.part) : null;
    if (this.current !== null) nodes.get(this.current).setAttribute("tabindex", "0");
    this.mark();
    this.legend();
    this.canvas.setAttribute("data-parts", String(nodes.size));
  }
  mark() {
    for (const [p, g] of this.nodes) g.classList.toggle("chosen", p === this.chosen);
    for (const path of this.world.querySelectorAll(".edge")) {
      const [a, b] = path.dataset.edge.split(" ").map(Number);
      path.classList.toggle("near", this.chosen !== null && (a === this.chosen || b === this.chosen));
    }
  }
  legend() {
    const { mode, shares, casts } = this.M, counts = shares[0], alone = casts.filter((c) => c.sign).length;
    const key = (color, count, words) => make("span", { class: "key", "data-class": color, "data-count": count }, make("i", { class: `swatch ${color}` }), `${words} (${count}) `);
    this.keys.replaceChildren(...mode.names.map((name, i) => (name && counts[i] ? key(mode.colors[i], counts[i], name) : null)).filter(Boolean),
      key("cast", casts.length, "Casts"), ...(alone ? [key("cast alone", alone, "new Casts")] : []));
  }

  // -- pan and zoom --------------------------------------------------------------------------------
  show() { this.world.setAttribute("transform", `translate(${this.view.x} ${this.view.y}) scale(${this.view.k})`); }
  zoom(factor, cx = this.frame.clientWidth / 2, cy = this.frame.clientHeight / 2) {
    const { view } = this, k = Math.max(0.05, Math.min(3, view.k * factor));
    this.view = { x: cx - ((cx - view.x) * k) / view.k, y: cy - ((cy - view.y) * k) / view.k, k };
    this.show();
  }
  /** Fit the graph to the width of its frame, from the top; with `whole`, also to its height. */
  fit(whole) {
    const w = this.frame.clientWidth, h = this.frame.clientHeight;
    const k = Math.max(whole ? 0.05 : 0.55, Math.min(1.2, w / (this.total.w + 60), whole ? h / (this.total.h + 20) : Infinity));
    this.view = { k, x: (this.frame.clientWidth - this.total.w * k) / 2, y: 8 };
    this.show();
  }
  center(p) {
    const box = this.layout.boxes.get(p), { view, frame } = this;
    if (!box) return;
    const h = Math.min(box.h, frame.clientHeight / view.k / 2);
    view.x = frame.clientWidth / 2 - (box.x + box.w / 2) * view.k;
    view.y = frame.clientHeight / 2 - (box.y + h / 2) * view.k;
    this.show();
  }
  /** Center a part unless it is visible. */
  ensureVisible(p) {
    const box = this.layout.boxes.get(p), { view, frame } = this;
    if (!box) return;
    const x = box.x * view.k + view.x, y = box.y * view.k + view.y;
    if (x < 0 || y < 0 || x + box.w * view.k > frame.clientWidth || y + Math.min(box.h, GraphLayout.H) * view.k > frame.clientHeight) this.center(p);
  }

  // -- actions -------------------------------------------------------------------------------------
  get active() { return Boolean(document.activeElement) && this.canvas.contains(document.activeElement); }
  focus(p, silent) {
    if (this.nodes.has(this.current)) this.nodes.get(this.current).setAttribute("tabindex", "-1");
    this.current = p;
    if (!this.nodes.has(p)) return;
    this.nodes.get(p).setAttribute("tabindex", "0");
    if (!silent) this.nodes.get(p).focus({ preventScroll: true });
  }
  back() { if (this.nodes.has(this.current)) this.nodes.get(this.current).focus({ preventScroll: true }); }
  /** Collapse or expand a scope without moving it. */
  toggle(s) {
    const { M, view } = this, here = this.active, opened = !M.open.has(s), box = this.layout.boxes.get(M.number + s);
    const at = box ? { x: box.x * view.k + view.x, y: box.y * view.k + view.y } : null;
    if (opened) M.open.add(s); else M.open.delete(s);
    this.draw();
    const now = this.layout.boxes.get(M.number + s);
    if (at && now) { view.x += at.x - (now.x * view.k + view.x); view.y += at.y - (now.y * view.k + view.y); }
    this.show();
    if (this.nodes.has(M.number + s)) this.focus(M.number + s, !here);
    this.details.say(`${opened ? "expanded" : "collapsed"} ${this.M.scopes.name[s]}`);
  }
  act(p) { if (p >= this.M.number) this.toggle(p - this.M.number); else this.details.showOp(p); }
  /** Expand the scopes around an op, or around its first reader if it is not drawn; return the visible op. */
  reveal(v) {
    const { M } = this, here = this.active, target = M.drawn(v) ? v : (M.readers[v] || []).find((r) => M.drawn(r)) ?? v;
    if (M.openAround(target)) this.draw();
    this.focus(target, !here);
    return target;
  }
  goTo(v) {
    const target = this.reveal(v);
    this.details.showOp(v);
    this.center(target);
  }
  neighbor(p, key) {
    const { M, edges, layout } = this;
    if (key === "ArrowUp" || key === "ArrowDown") {
      if (M.isOpen(p)) return key === "ArrowDown" ? M.parts[p - M.number][0] : M.scopeOf(p) > 0 ? M.number + M.scopeOf(p) : undefined;
      const near = edges.filter((e) => (key === "ArrowUp" ? e.reader === p : e.source === p)).map((e) => (key === "ArrowUp" ? e.source : e.reader));
      if (near.length) return near[0];
      return key === "ArrowUp" && M.scopeOf(p) > 0 ? M.number + M.scopeOf(p) : undefined;
    }
    const shown = [...this.nodes.keys()].filter((q) => !M.isOpen(q)).map((q) => [q, ...layout.middle(q)]);
    shown.sort((a, b) => a[2] - b[2] || a[1] - b[1]);
    const at = shown.findIndex(([q]) => q === p);
    return (shown[key === "ArrowRight" ? at + 1 : at - 1] || [])[0];
  }
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.current === null) return;
    const { M, current, board } = this, key = event.key;
    if (key.startsWith("Arrow")) {
      const next = this.neighbor(current, key);
      if (next !== undefined && this.nodes.has(next)) { this.focus(next); this.ensureVisible(next); }
    } else if (key === "Enter" || key === " ") {
      const cast = event.target.closest("[data-cast]");
      if (cast) cast.dispatchEvent(new Event("click"));
      else this.act(current);
    } else if (key === "Escape") {
      if (this.details.clear()) this.back();
      else if (M.isOpen(current)) this.toggle(current - M.number);
      else if (M.scopeOf(current) > 0) this.toggle(M.scopeOf(current));
    } else if (key === "/") board.search.focus();
    else if (key === "c" || key === "C") board.nextCast(key === "c" ? 1 : -1);
    else if ((key === "n" || key === "N") && board.changed.length) board.nextChange(key === "n" ? 1 : -1);
    else if (key === "+") this.zoom(1.25);
    else if (key === "-") this.zoom(0.8);
    else if (key === "0") this.fit(true);
    else return;
    event.preventDefault();
  }
  listen() {
    const { canvas, frame } = this, fingers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event); moved = 0; });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      this.view.x += event.clientX - before.clientX;
      this.view.y += event.clientY - before.clientY;
      this.show();
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > 4 && !canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, event);
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    canvas.addEventListener("click", (event) => {
      const g = event.target.closest("[data-part]");
      if (!g || moved > 4) return;
      this.focus(Number(g.dataset.part));
      this.act(Number(g.dataset.part));
    });
    canvas.addEventListener("keydown", (event) => this.press(event));
    frame.addEventListener("focusin", (event) => { // a screen reader moves the focus without keys
      const g = event.target.closest("[data-part]");
      if (g && Number(g.dataset.part) !== this.current) this.focus(Number(g.dataset.part), true);
    });
    addEventListener("beforeprint", () => {
      canvas.setAttribute("viewBox", `0 0 ${this.total.w + 60} ${this.total.h + 20}`);
      this.world.removeAttribute("transform");
    });
    addEventListener("afterprint", () => { canvas.removeAttribute("viewBox"); this.show(); });
  }
}

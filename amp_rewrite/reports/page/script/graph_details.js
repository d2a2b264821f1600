/** The pane beside a graph. It shows an op with its changes, reasons, inputs and readers, or a list of Casts. */
class Details {
  constructor(view) {
    this.view = view;
    this.box = make("aside", { class: "details", "aria-label": "Details", tabindex: "-1" });
    this.box.addEventListener("keydown", (event) => { if (event.key === "Escape") { this.clear(); view.back(); } });
    this.clear();
  }
  say(text) { this.view.board.status.textContent = text; }
  clear() {
    const keys = `arrows move, Enter opens, Escape closes, / searches, c goes to the next Cast${this.view.M.changes.size ? ", n to the next change" : ""}, + − 0 zoom`;
    this.box.replaceChildren(make("p", { class: "hint" }, `Select an op to see why it has its type. Keys: ${keys}. Drag to move; zoom with Ctrl and the mouse wheel.`));
    const wasOpen = this.view.chosen !== null;
    this.view.chosen = null;
    this.view.mark();
    return wasOpen;
  }
  link(v, text) {
    const { M } = this.view;
    return make("button", { class: "link", onclick: () => this.view.goTo(v) }, text || M.nameOf(v).trim() || M.label(v));
  }
  fill(title, ...children) {
    const { view } = this;
    const closer = make("button", { class: "close", "aria-label": "Close details", onclick: () => { this.clear(); view.back(); } }, "×");
    this.box.replaceChildren(closer, make("h3", { tabindex: "-1" }, title), ...children);
    this.box.scrollTop = 0;
  }
  reasonOf(v) {
    const { M } = this.view, word = (column) => M.word(column, v), rule = word("rule"), note = word("note"), entry = word("entry");
    const item = make("li", {}, make("b", {}, word("op")), " ", this.link(v), ` is ${word("dtype")}`);
    if (word("variables")) item.append(` (${word("variables")})`);
    if (!rule) {
      item.append(LOW_TYPE.test(word("dtype")) ? " in the model" : HIGH_TYPE.test(word("dtype")) ? " in the model; not yet decided" : ": it does not compute in floating point");
      return item;
    }
    item.append(": ", make("code", {}, rule), make("br"), M.rules[rule].words + (note ? `: ${note}` : ""));
    if (M.rules[rule].page) item.append(make("br"), "more: ", make("code", {}, `amp-rewrite explain ${rule}`));
    if (entry) item.append(make("br"), make("span", { class: "entry" }, entry));
    return item;
  }
  showOp(v) {
    const { view } = this, { M } = view, { G, ops, rows } = M;
    view.chosen = v;
    view.mark();
    const list = make("dl", {});
    const fact = (name, ...values) => list.append(make("dt", {}, name), make("dd", {}, ...values));
    const changes = M.changes.get(v) || [];
    if (changes.length) fact("changed", make("ul", { class: "changes" }, ...changes.map((c) => make("li", {}, M.changeWords(c)))));
    fact("name", M.nameOf(v));
    fact("type", M.word("variables", v) || M.word("dtype", v));
    if (v < rows && (!G.inventory || !changes.length)) {
      const steps = make("ol", { class: "reasons" }), seen = new Set();
      for (let at = v; at >= 0 && !seen.has(at); at = ops.because[at]) { seen.add(at); steps.append(this.reasonOf(at)); }
      fact("why", steps);
    }
    if (G.flops && G.flops[v]) fact("FLOPs", G.flops[v].toLocaleString("en"));
    const split = (text) => (text ? text.split(", ") : []);
    const inputs = make("ul", {}), read = split(M.word("inputs", v));
    for (let i = 0; i < Math.max(read.length, ops.reads[v].length); i++) {
      const source = ops.reads[v][i], from = source >= 0 ? this.link(source) : read[i] ? "a weight or constant" : "omitted";
      const item = make("li", {}, make("code", {}, read[i] || "–"), " ", from);
      for (const c of (source >= 0 && M.castsOn.get(source * M.number + v)) || []) item.append(" ", this.castText(M.casts[c]));
      inputs.append(item);
    }
    if (inputs.firstChild) fact("inputs", inputs);
    const results = split(M.word("outputs", v));
    if (results.length) fact("outputs", make("code", {}, results.join(", ")));
    const readers = [...new Set(M.readers[v] || [])];
    if (readers.length) {
      const items = readers.slice(0, 12).map((r) => make("li", {}, make("b", {}, M.word("op", r)), " ", this.link(r)));
      if (readers.length > 12) items.push(make("li", {}, `and ${readers.length - 12} more`));
      fact("read by", make("ul", {}, ...items));
    }
    this.fill(M.label(v), list);
    this.say(M.describe(v));
  }
  castText(cast) {
    return make("span", { class: "casttext" }, (cast.sign ? "new: " : "") + this.view.M.casting(cast));
  }
  showCasts(which) {
    const { casts, words } = this.view.M;
    const items = which.map((c) => {
      const cast = casts[c];
      const item = make("li", {}, make("code", {}, cast.value), make("br"), this.castText(cast), ` · ${cast.origin} · ${plural(cast.readers, "reader")}`, make("br"), words[cast.why]);
      if (cast.edges.length) item.append(make("br"), "from ", this.link(cast.edges[0]), " to ", this.link(cast.edges[1]));
      return item;
    });
    this.fill(which.length > 1 ? `${which.length} Casts` : "Cast", make("ul", { class: "castlist" }, ...items));
    this.say(`Cast ${casts[which[0]].from} to ${casts[which[0]].to} of ${casts[which[0]].value}`);
  }
}

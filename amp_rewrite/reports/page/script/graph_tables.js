/** The ops of a graph as a table, in pages; those that the search found, while there is a search. */
class OpsTable {
  static PAGE = 100;
  constructor(view, hits) {
    this.view = view;
    this.hits = hits;
    this.page = 0;
    this.body = make("div", {});
    this.box = make("details", { class: "alternative", ontoggle: () => this.box.open && this.fill() }, make("summary", {}, "Ops as a table"), this.body);
  }
  refresh() {
    this.page = 0;
    if (this.box.open) this.fill();
  }
  fill() {
    const { M, details } = this.view, found = this.hits(), listed = found ? found.filter((v) => v < M.rows) : null;
    const whole = listed ? listed.length : M.rows, first = this.page * OpsTable.PAGE, last = Math.min(whole, first + OpsTable.PAGE);
    const rows = [];
    for (let i = first; i < last; i++) {
      const v = listed ? listed[i] : i, word = (column) => make("td", {}, M.word(column, v));
      const changes = M.G.changes ? [make("td", {}, (M.changes.get(v) || []).map((c) => M.changeWords(c)).join("; "))] : [];
      rows.push(make("tr", {}, make("td", { class: "number" }, String(v)), make("td", {}, details.link(v)), word("op"), word("dtype"), ...changes, word("rule"), word("note")));
    }
    const head = ["row", "op", "type", "element type", ...(M.G.changes ? ["changed"] : []), "rule", "note"];
    const turn = (step) => { this.page += step; this.fill(); };
    this.body.replaceChildren(
      make("p", {}, whole ? `${first + 1} to ${last} of ${whole} ` : "no op ",
        this.page ? button("previous", "Previous rows", () => turn(-1)) : null, " ", last < whole ? button("next", "Next rows", () => turn(1)) : null),
      tableOf("Ops", head, rows));
  }
}

/** Return the Casts of a graph as a table that is filled when it opens. */
function castTable(view, go) {
  const MOST = 1000, { casts, words } = view.M, body = make("div", {});
  const box = make("details", { class: "alternative", ontoggle: () => {
    if (!box.open || body.firstChild) return;
    const signed = casts.some((cast) => cast.sign), cell = (text, kind) => make("td", { class: kind }, text);
    const rows = casts.slice(0, MOST).map((cast, c) => make("tr", {}, make("td", {}, make("button", { class: "link", onclick: () => go(c) }, cast.value)), cell(cast.from), cell(cast.to),
      cell(cast.bytes !== undefined ? bytes(cast.bytes) : "unknown", "number"), cell(String(cast.readers), "number"), cell(cast.origin), ...(signed ? [cell(cast.sign ? "new" : "")] : []), cell(words[cast.why])));
    const head = ["Cast of", "from", "to", "bytes moved", "readers", "origin", ...(signed ? ["changed"] : []), "why"];
    body.append(tableOf("Casts", head, rows, casts.length > MOST ? make("p", {}, `and ${casts.length - MOST} more`) : null));
  } }, make("summary", {}, `Casts as a table (${casts.length})`), body);
  return box;
}

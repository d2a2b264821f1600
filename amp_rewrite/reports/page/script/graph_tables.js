/** The ops of a graph as a table; those that the search found, while there is a search. */
class OpsTable {
  static MOST = 500;
  constructor(view, hits) {
    this.view = view;
    this.hits = hits;
    this.body = make("div", {});
    this.box = make("details", { class: "alternative", ontoggle: () => this.refresh() }, make("summary", {}, "Ops as a table"), this.body);
  }
  refresh() {
    if (!this.box.open) return;
    const { M, details } = this.view, found = this.hits() || [...Array(M.rows).keys()], listed = found.filter((v) => v < M.rows);
    const rows = listed.slice(0, OpsTable.MOST).map((v) => {
      const word = (column) => make("td", {}, M.word(column, v));
      const changes = M.G.changes ? [make("td", {}, (M.changes.get(v) || []).map((c) => M.changeWords(c)).join("; "))] : [];
      return make("tr", {}, make("td", { class: "number" }, String(v)), make("td", {}, details.link(v)), word("op"), word("dtype"), ...changes, word("rule"), word("note"));
    });
    const head = ["row", "op", "type", "element type", ...(M.G.changes ? ["changed"] : []), "rule", "note"];
    const heads = head.map((title) => make("th", { scope: "col" }, title)), more = listed.length - rows.length;
    this.body.replaceChildren(make("p", {}, plural(listed.length, "op") + (more > 0 ? `; the first ${rows.length} are listed, the search finds the others` : "")),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ops" },
        make("table", { class: "table" }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))));
  }
}

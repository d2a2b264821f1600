/** Sizes and positions of the visible parts: layers come from Python, coordinates from here. */
class GraphLayout {
  static H = 40; static GAPX = 18; static GAPY = 34; static PAD = 14; static HEAD = 24; static MAX_WIDTH = 1000;
  constructor(model) {
    this.M = model;
    this.boxes = new Map();
    this.extents = new Map(); // right edge of each layer of an open scope
  }
  /** Lay out all visible parts; return the outermost box. */
  whole() {
    this.boxes.clear();
    this.extents.clear();
    const root = this.measure(this.M.number);
    this.place(root, 0, 0);
    return root;
  }
  measure(p) {
    const { H, GAPX, GAPY, PAD, HEAD, MAX_WIDTH } = GraphLayout, { M } = this;
    const box = { p, x: 0, y: 0, w: 0, h: H, rows: null };
    this.boxes.set(p, box);
    if (!M.isOpen(p)) {
      const head = columns(M.label(p)) + 5 + (M.sign(p) ? 2 : 0);
      box.w = Math.max(96, Math.min(230, 7.2 * Math.max(head, columns(M.below(p))) + 22));
      if (p >= M.number) box.h = H + 8;
      return box;
    }
    box.rows = [];
    let layer = null, row = null;
    for (const part of M.parts[p - M.number]) {
      const inner = this.measure(part);
      if (M.layerOf(part) !== layer || row.w + inner.w > MAX_WIDTH) {
        row = { items: [], w: 0, h: 0, layer: (layer = M.layerOf(part)) };
        box.rows.push(row);
      }
      row.items.push(inner);
      row.w += inner.w + (row.items.length > 1 ? GAPX : 0);
      row.h = Math.max(row.h, inner.h);
    }
    const head = p === M.number ? 0 : HEAD;
    const minWidth = p === M.number ? 0 : 7.2 * columns(cut(M.label(p), 40)) + 60;
    box.w = Math.max(minWidth, ...box.rows.map((r) => r.w)) + 2 * PAD + 14;
    box.h = head + 2 * PAD + box.rows.reduce((h, r) => h + r.h, 0) + GAPY * Math.max(0, box.rows.length - 1);
    return box;
  }
  place(box, x, y) {
    const { GAPX, GAPY, PAD, HEAD } = GraphLayout;
    box.x = x;
    box.y = y;
    if (!box.rows) return;
    let at = y + PAD + (box.p === this.M.number ? 0 : HEAD);
    const right = [];
    for (const row of box.rows) {
      let from = x + (box.w - row.w) / 2;
      right[row.layer] = Math.max(right[row.layer] || 0, from + row.w);
      for (const inner of row.items) {
        this.place(inner, from, at + (row.h - inner.h) / 2);
        from += inner.w + GAPX;
      }
      at += row.h + GAPY;
    }
    this.extents.set(box.p - this.M.number, right);
  }
  /** Return the path of an edge. An edge past other layers runs to their right. */
  route(edge, turn) {
    const { M, extents } = this, { GAPY } = GraphLayout;
    const a = this.boxes.get(edge.source), b = this.boxes.get(edge.reader);
    const x1 = a.x + a.w / 2, y1 = a.y + a.h, x2 = b.x + b.w / 2, y2 = b.y;
    const up = M.chain(edge.source), down = M.chain(edge.reader);
    let i = up.length - 1, j = down.length - 1;
    while (i > 0 && j > 0 && up[i - 1] === down[j - 1]) { i--; j--; }
    const first = i > 0 ? M.layerOf(up[i - 1]) : 0, last = j > 0 ? M.layerOf(down[j - 1]) : 0;
    const right = (extents.get(up[i] - M.number) || []).slice(Math.min(first, last) + 1, Math.max(first, last));
    for (let u = 0; u < i - 1; u++) right.push(...(extents.get(up[u + 1] - M.number) || []).slice(M.layerOf(up[u]) + 1));
    for (let d = 0; d < j - 1; d++) right.push(...(extents.get(down[d + 1] - M.number) || []).slice(0, M.layerOf(down[d])));
    if (last > first && (!right.length || y2 - y1 < GAPY * 1.5)) {
      const bend = Math.max(16, Math.min(60, (y2 - y1) / 2));
      return { d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`, x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
    }
    const side = Math.max(x1, x2, ...right.map((r) => r || 0)) + 10 + (turn % 5) * 4;
    return {
      d: `M${x1} ${y1}C${x1} ${y1 + 26} ${side} ${y1 + 4} ${side} ${y1 + 34}V${y2 - 34}C${side} ${y2 - 4} ${x2} ${y2 - 26} ${x2} ${y2}`,
      x: side, y: (y1 + y2) / 2,
    };
  }
  middle(p) { const b = this.boxes.get(p); return [b.x + b.w / 2, b.y + b.h / 2]; }
}

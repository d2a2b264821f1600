"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svgName = "http://www.w3.org/2000/svg";

  /** Return an element with attributes and children; texts are never markup. */
  function make(tag, attributes, ...children) {
    const inSvg = /^(svg|g|rect|path|text|title|circle)$/.test(tag);
    const made = inSvg ? document.createElementNS(svgName, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  const plural = (number, one, many) => `${number} ${number === 1 ? one : many || one + "s"}`;
  function bytes(number) {
    let unit = "B";
    for (const next of ["kB", "MB", "GB", "TB"]) if (number >= 1000) { number /= 1000; unit = next; }
    return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
  }

  /** The graph: data in columns, made navigable. */
  function graph(G, section) {
    const { ops, scopes, casts, words, rules } = G;
    const number = ops.op.length;
    const word = (column, v) => words[ops[column][v]];
    const nameOf = (v) => words[ops.prefix[v]] + ops.name[v];
    const drawn = (v) => ops.place[2 * v] >= 0;
    const low = /^b?float(16|8.*)$/, high = /^(float|double)/;
    const short = (type) => type.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i");

    // Parts of scopes: vertices by number, scopes after them.
    const parts = scopes.name.map(() => []);
    for (let v = 0; v < number; v++) if (drawn(v)) parts[ops.scope[v]].push(v);
    for (let s = 1; s < scopes.name.length; s++) if (scopes.place[2 * s] >= 0) parts[scopes.parent[s]].push(number + s);
    const layerOf = (p) => (p < number ? ops.place[2 * p] : scopes.place[2 * (p - number)]);
    const orderOf = (p) => (p < number ? ops.place[2 * p + 1] : scopes.place[2 * (p - number) + 1]);
    for (const inside of parts) inside.sort((a, b) => layerOf(a) - layerOf(b) || orderOf(a) - orderOf(b));
    const readers = Array.from({ length: number }, () => null);
    ops.reads.forEach((reads, v) => reads.forEach((made) => {
      if (made >= 0) (readers[made] || (readers[made] = [])).push(v);
    }));
    const castsOn = new Map();
    casts.forEach((cast, c) => {
      for (let i = 0; i < cast.edges.length; i += 2) {
        const key = cast.edges[i] * number + cast.edges[i + 1];
        if (castsOn.has(key)) castsOn.get(key).push(c); else castsOn.set(key, [c]);
      }
    });

    // -- colors --------------------------------------------------------------------------------------
    const ruleNumbers = new Map();
    for (let v = 0; v < G.rows; v++) if (ops.rule[v]) ruleNumbers.set(ops.rule[v], (ruleNumbers.get(ops.rule[v]) || 0) + 1);
    const frequent = [...ruleNumbers].sort((a, b) => b[1] - a[1]).map(([rule]) => rule);
    const most = 7;
    const steps = [0, 0.01, 0.05, 0.2];
    const modes = {
      type: {
        title: "element type",
        of: (v) => ops.side[v],
        names: [[...new Set(ops.dtype)].map((w) => words[w]).filter((w) => low.test(w)).join(", ") || "low", "float32 and wider", "no floats"],
        colors: ["low", "high", "muted"],
      },
      rule: {
        title: "rule",
        of: (v) => { const at = ops.rule[v] ? frequent.indexOf(ops.rule[v]) : -1; return at < 0 ? most + 1 : Math.min(at, most); },
        names: [...Array(most)].map((_, i) => (frequent[i] ? words[frequent[i]] : null))
          .concat([frequent.length > most ? "other rules" : null, "no rule"]),
        colors: [...Array(most)].map((_, i) => `rule${i}`).concat(["rule7", "muted"]),
      },
    };
    if (G.errors) modes.error = {
      title: "error share",
      of: (v) => { const e = v < G.rows ? G.errors[v] : null; return e === null || e === undefined ? 4 : steps.findLastIndex((s) => e >= s); },
      names: ["below 1 %", "1 to 5 %", "5 to 20 %", "20 % or more", "not measured"],
      colors: ["error0", "error1", "error2", "error3", "muted"],
    };
    let mode = modes.type;
    let classes, shares;
    function classify() {
      classes = new Uint8Array(number);
      shares = scopes.name.map(() => new Array(mode.names.length).fill(0));
      for (let v = 0; v < number; v++) {
        classes[v] = mode.of(v);
        if (v < G.rows && drawn(v)) shares[ops.scope[v]][classes[v]]++;
      }
      for (let s = scopes.name.length - 1; s > 0; s--) shares[s].forEach((n, i) => { shares[scopes.parent[s]][i] += n; });
    }
    classify();
    const size = (s) => shares[s].reduce((a, b) => a + b, 0);

    // -- folding -------------------------------------------------------------------------------------
    const open = new Set([0]);
    const top = new Int32Array(scopes.name.length);
    function fold() {
      top[0] = -1;
      for (let s = 1; s < top.length; s++) {
        const above = top[scopes.parent[s]];
        top[s] = above !== -1 ? above : open.has(s) ? -1 : s;
      }
    }
    const shownAs = (v) => (top[ops.scope[v]] === -1 ? v : number + top[ops.scope[v]]);
    const scopeOf = (p) => (p < number ? ops.scope[p] : scopes.parent[p - number]);
    const FEW = 48, MANY = 2500;
    (() => { // unfold while the drawing stays small: small scopes first, and equal ones beside each other together
      let shown = parts[0].length, closed = parts[0].filter((p) => p >= number);
      const within = (p) => parts[p - number];
      while (closed.length) {
        const least = closed.reduce((a, b) => (within(b).length < within(a).length ? b : a));
        const alike = closed.filter((p) => scopeOf(p) === scopeOf(least) && within(p).length === within(least).length);
        const inside = alike.flatMap(within);
        if (shown > 8 && shown + inside.length > FEW) break;
        alike.forEach((p) => open.add(p - number));
        shown += inside.length;
        closed = closed.filter((p) => !alike.includes(p)).concat(inside.filter((p) => p >= number));
      }
    })();

    // -- sizes and places: layers from Python, coordinates here --------------------------------------
    const H = 40, GAPX = 18, GAPY = 34, PAD = 14, HEAD = 24, WIDEST = 1000;
    const wide = (c) => (c.codePointAt(0) >= 0x1100 ? 2 : 1);
    const taken = (text) => [...text.slice(0, 200)].reduce((n, c) => n + wide(c), 0);
    function cut(text, most) { // by columns, and never within a character
      if (taken(text) <= most) return text;
      let kept = "", room = most - 1;
      for (const c of text) { if ((room -= wide(c)) < 0) break; kept += c; }
      return `${kept}…`;
    }
    const label = (p) => (p < number ? word("op", p) : scopes.name[p - number]);
    const below = (p) => {
      if (p >= number) return plural(size(p - number), "op");
      return ops.name[p] === label(p) ? "" : ops.name[p];
    };
    const boxes = new Map();
    const extents = new Map(); // right edge of each layer of an open scope
    function measure(p) {
      const box = { p, x: 0, y: 0, w: 0, h: H, rows: null };
      boxes.set(p, box);
      if (p < number || !open.has(p - number)) {
        box.w = Math.max(96, Math.min(230, 7.2 * Math.max(taken(label(p)) + 5, taken(below(p))) + 22));
        if (p >= number) box.h = H + 8;
        return box;
      }
      box.rows = [];
      let layer = null, row = null;
      for (const part of parts[p - number]) {
        const inner = measure(part);
        if (layerOf(part) !== layer || row.w + inner.w > WIDEST) {
          row = { items: [], w: 0, h: 0, layer: (layer = layerOf(part)) };
          box.rows.push(row);
        }
        row.items.push(inner);
        row.w += inner.w + (row.items.length > 1 ? GAPX : 0);
        row.h = Math.max(row.h, inner.h);
      }
      const head = p === number ? 0 : HEAD;
      const least = p === number ? 0 : 7.2 * taken(cut(label(p), 40)) + 60;
      box.w = Math.max(least, ...box.rows.map((r) => r.w)) + 2 * PAD + 14;
      box.h = head + 2 * PAD + box.rows.reduce((h, r) => h + r.h, 0) + GAPY * Math.max(0, box.rows.length - 1);
      return box;
    }
    function place(box, x, y) {
      box.x = x;
      box.y = y;
      if (!box.rows) return;
      let at = y + PAD + (box.p === number ? 0 : HEAD);
      const right = [];
      for (const row of box.rows) {
        let from = x + (box.w - row.w) / 2;
        right[row.layer] = Math.max(right[row.layer] || 0, from + row.w);
        for (const inner of row.items) {
          place(inner, from, at + (row.h - inner.h) / 2);
          from += inner.w + GAPX;
        }
        at += row.h + GAPY;
      }
      extents.set(box.p - number, right);
    }
    function edgesShown() {
      const shown = new Map();
      for (let v = 0; v < number; v++) {
        if (!drawn(v)) continue;
        const reader = shownAs(v);
        for (const made of ops.reads[v]) {
          if (made < 0 || !drawn(made)) continue;
          const source = shownAs(made);
          if (source === reader) continue;
          const key = source * (number + top.length) + reader;
          let edge = shown.get(key);
          if (!edge) shown.set(key, (edge = { source, reader, n: 0, casts: new Set() }));
          edge.n++;
          for (const c of castsOn.get(made * number + v) || []) edge.casts.add(c);
        }
      }
      return [...shown.values()];
    }
    function chain(p) { const all = [p]; for (let s = scopeOf(p); s >= 0; s = scopes.parent[s]) all.push(number + s); return all; }
    /** Return the path of an edge. One that passes layers runs at their right. */
    function course(edge, turn) {
      const a = boxes.get(edge.source), b = boxes.get(edge.reader);
      const x1 = a.x + a.w / 2, y1 = a.y + a.h, x2 = b.x + b.w / 2, y2 = b.y;
      const up = chain(edge.source), down = chain(edge.reader);
      let i = up.length - 1, j = down.length - 1;
      while (i > 0 && j > 0 && up[i - 1] === down[j - 1]) { i--; j--; }
      const first = i > 0 ? layerOf(up[i - 1]) : 0, last = j > 0 ? layerOf(down[j - 1]) : 0;
      const right = (extents.get(up[i] - number) || []).slice(Math.min(first, last) + 1, Math.max(first, last));
      for (let u = 0; u < i - 1; u++) right.push(...(extents.get(up[u + 1] - number) || []).slice(layerOf(up[u]) + 1));
      for (let d = 0; d < j - 1; d++) right.push(...(extents.get(down[d + 1] - number) || []).slice(0, layerOf(down[d])));
      if (last > first && (!right.length || y2 - y1 < GAPY * 1.5)) {
        const bend = Math.max(16, Math.min(60, (y2 - y1) / 2));
        return { d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`, x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
      }
      const side = Math.max(x1, x2, ...right.map((r) => r || 0)) + 10 + (turn % 5) * 4;
      const middle = (y1 + y2) / 2;
      return {
        d: `M${x1} ${y1}C${x1} ${y1 + 26} ${side} ${y1 + 4} ${side} ${y1 + 34}V${y2 - 34}C${side} ${y2 - 4} ${x2} ${y2 - 26} ${x2} ${y2}`,
        x: side, y: middle,
      };
    }

    // -- drawing -------------------------------------------------------------------------------------
    const world = make("g", {});
    const canvas = make("svg", { role: "group", class: "canvas", "aria-label": "Graph of ops. Arrows move along edges, Enter opens, Escape closes." }, world);
    const said = make("p", { class: "said", role: "status", "aria-live": "polite" });
    const details = make("aside", { class: "details", "aria-label": "Details", tabindex: "-1" });
    const frame = make("div", { class: "frame-box" }, canvas);
    const nodes = new Map();
    let current = null, chosen = null, edges = [], total = { w: 1, h: 1 };

    function describe(p) {
      if (p >= number) return `scope ${label(p)}, ${below(p)}, ${open.has(p - number) ? "unfolded" : "folded"}`;
      const rule = word("rule", p);
      return `${label(p)} ${nameOf(p)}, ${word("dtype", p)}${rule ? `, ${rule}` : ""}`;
    }
    function bar(box) {
      const counts = shares[box.p - number], whole = size(box.p - number) || 1;
      const g = make("g", {});
      let x = box.x + 10;
      counts.forEach((n, i) => {
        const w = ((box.w - 20) * n) / whole;
        if (n) g.append(make("rect", { x, y: box.y + box.h - 9, width: w, height: 4, class: mode.colors[i] }));
        x += w;
      });
      return g;
    }
    function node(box) {
      const { p, x, y, w, h } = box;
      const isScope = p >= number, isOpen = isScope && open.has(p - number);
      const kind = isOpen ? "frame" : isScope ? "scope" : p >= G.rows ? "port" : "op";
      const g = make("g", {
        class: `node ${kind}${isScope ? "" : ` ${mode.colors[classes[p]]}`}`, role: "button", tabindex: "-1",
        "aria-label": describe(p), "aria-expanded": isScope ? String(isOpen) : null, "data-part": p,
      });
      g.append(make("rect", { x, y, width: w, height: h, rx: isOpen ? 8 : isScope ? 10 : 4, class: "box" }));
      const most = Math.floor((w - 16) / 6.6);
      if (isOpen) {
        g.append(make("text", { x: x + 12, y: y + 18, class: "head" }, `▾ ${cut(label(p), most - 6)}`));
      } else {
        const tag = p < number ? short(word("dtype", p)) : "▸";
        const sub = cut(below(p), most);
        g.append(make("text", { x: x + 9, y: sub ? y + 16 : y + h / 2 + 4, class: "head" }, cut(label(p), Math.floor((w - 16) / 7.2) - tag.length - 1)));
        g.append(make("text", { x: x + w - 8, y: y + 16, class: "tag" }, cut(tag, 8)));
        if (sub) g.append(make("text", { x: x + 9, y: y + 31, class: "sub" }, sub));
        if (isScope) g.append(bar(box));
      }
      g.append(make("title", {}, describe(p)));
      nodes.set(p, g);
      return g;
    }
    function castMark(edge, at) {
      const all = [...edge.casts].map((c) => casts[c]);
      const known = all.every((c) => c.bytes !== undefined), moved = all.reduce((n, c) => n + (c.bytes || 0), 0);
      const text = (all.length > 1 ? `${all.length} Casts` : `${short(all[0].from)}→${short(all[0].to)}`) + (known ? ` ${bytes(moved)}` : "");
      const w = text.length * 6.2 + 12;
      const g = make("g", { class: "castmark", "data-cast": [...edge.casts][0], role: "button", tabindex: "-1",
        "aria-label": `Cast: ${text}`, onclick: () => showCasts([...edge.casts]) });
      g.append(make("rect", { x: at.x - w / 2, y: at.y - 8, width: w, height: 16, rx: 8 }),
        make("text", { x: at.x, y: at.y + 4 }, text), make("title", {}, all.map((c) => `${c.from} → ${c.to} of ${c.value}`).slice(0, 5).join("\n")));
      return g;
    }
    function draw() {
      fold();
      boxes.clear();
      extents.clear();
      nodes.clear();
      const root = measure(number);
      place(root, 0, 0);
      total = root;
      frame.style.setProperty("--tall", `${Math.round(root.h + 60)}px`);
      const frames = make("g", {}), lines = make("g", { class: "edges" }), leaves = make("g", {}), marks = make("g", {});
      edges = edgesShown();
      edges.forEach((edge, turn) => {
        const at = course(edge, turn);
        lines.append(make("path", { d: at.d, class: edge.casts.size ? "edge withcast" : "edge", "data-edge": `${edge.source} ${edge.reader}` }));
        if (edge.casts.size) marks.append(castMark(edge, at));
      });
      for (const box of boxes.values()) if (box.p !== number) (box.rows ? frames : leaves).append(node(box));
      world.replaceChildren(frames, lines, leaves, marks);
      if (!nodes.has(current)) current = leaves.firstChild ? Number(leaves.firstChild.dataset.part) : null;
      if (current !== null) nodes.get(current).setAttribute("tabindex", "0");
      mark();
      legend();
      print();
    }
    function mark() {
      for (const [p, g] of nodes) g.classList.toggle("chosen", p === chosen);
      for (const path of world.querySelectorAll(".edge")) {
        const [a, b] = path.dataset.edge.split(" ").map(Number);
        path.classList.toggle("near", chosen !== null && (a === chosen || b === chosen));
      }
    }

    // -- pan and zoom --------------------------------------------------------------------------------
    let view = { x: 0, y: 0, k: 1 };
    function show() { world.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.k})`); }
    function zoom(factor, cx = frame.clientWidth / 2, cy = frame.clientHeight / 2) {
      const k = Math.max(0.05, Math.min(3, view.k * factor));
      view = { x: cx - ((cx - view.x) * k) / view.k, y: cy - ((cy - view.y) * k) / view.k, k };
      show();
    }
    function fit(whole) {
      const w = frame.clientWidth, h = frame.clientHeight;
      const k = Math.min(1.2, w / (total.w + 60), whole ? h / (total.h + 20) : Infinity);
      view = { k: Math.max(whole ? 0.05 : 0.55, k), x: 0, y: 8 };
      view.x = (w - total.w * view.k) / 2;
      show();
    }
    function center(p) {
      const box = boxes.get(p);
      if (!box) return;
      const h = Math.min(box.h, frame.clientHeight / view.k / 2);
      view.x = frame.clientWidth / 2 - (box.x + box.w / 2) * view.k;
      view.y = frame.clientHeight / 2 - (box.y + h / 2) * view.k;
      show();
    }
    /** Move the view until a part is in sight. */
    function sight(p) {
      const box = boxes.get(p);
      if (!box) return;
      const x = box.x * view.k + view.x, y = box.y * view.k + view.y;
      if (x < 0 || y < 0 || x + box.w * view.k > frame.clientWidth || y + Math.min(box.h, H) * view.k > frame.clientHeight) center(p);
    }
    function print() { canvas.setAttribute("data-parts", String(nodes.size)); }
    const fingers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event); moved = 0; });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      const [one, two] = [...fingers.values()];
      if (two) {
        const other = one === before ? two : one;
        const was = Math.hypot(before.clientX - other.clientX, before.clientY - other.clientY);
        const is = Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY);
        const box = canvas.getBoundingClientRect();
        if (was) zoom(is / was, (event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top);
      } else {
        view.x += event.clientX - before.clientX;
        view.y += event.clientY - before.clientY;
        show();
      }
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > 4 && !canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, event);
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    canvas.addEventListener("click", (event) => {
      const g = event.target.closest("[data-part]");
      if (!g || moved > 4) return;
      focus(Number(g.dataset.part));
      act(Number(g.dataset.part));
    });

    // -- acting --------------------------------------------------------------------------------------
    function focus(p, silent) {
      if (nodes.has(current)) nodes.get(current).setAttribute("tabindex", "-1");
      current = p;
      if (!nodes.has(p)) return;
      nodes.get(p).setAttribute("tabindex", "0");
      if (!silent) nodes.get(p).focus({ preventScroll: true });
    }
    function toggle(s) {
      const box = boxes.get(number + s), at = box ? { x: box.x * view.k + view.x, y: box.y * view.k + view.y } : null;
      const here = document.activeElement && canvas.contains(document.activeElement);
      if (open.has(s)) open.delete(s); else open.add(s);
      draw();
      const now = boxes.get(number + s);
      if (at && now) { view.x += at.x - (now.x * view.k + view.x); view.y += at.y - (now.y * view.k + view.y); }
      show();
      if (nodes.has(number + s)) focus(number + s, !here);
      said.textContent = `${open.has(s) ? "unfolded" : "folded"} ${scopes.name[s]}`;
    }
    function act(p) {
      if (p >= number) toggle(p - number);
      else showOp(p);
    }
    function reveal(v) {
      let target = v;
      if (!drawn(v)) target = (readers[v] || []).find(drawn) ?? v;
      let changed = false;
      const here = canvas.contains(document.activeElement);
      for (let s = ops.scope[target]; s > 0; s = scopes.parent[s]) if (!open.has(s)) { open.add(s); changed = true; }
      if (changed) draw();
      focus(target, !here);
      return target;
    }
    function goTo(v) {
      const target = reveal(v);
      showOp(v);
      center(target);
    }
    const link = (v, text) => make("button", { class: "link", onclick: () => goTo(v) }, text || nameOf(v).trim() || label(v));

    // -- details -------------------------------------------------------------------------------------
    function close() {
      details.replaceChildren(hint());
      const had = chosen;
      chosen = null;
      mark();
      return had !== null;
    }
    const hint = () => make("p", { class: "hint" }, "Choose an op to see why it has its type. Keys: arrows move, Enter opens, Escape closes, / searches, c goes to the next Cast, + − 0 zoom. Drag to move, Ctrl and the wheel zoom.");
    function fact(list, name, ...values) { list.append(make("dt", {}, name), make("dd", {}, ...values)); }
    function types(text) { return text ? text.split(", ") : []; }
    function reasonOf(v) {
      const rule = word("rule", v), note = word("note", v), entry = word("entry", v);
      const item = make("li", {}, make("b", {}, word("op", v)), " ", link(v), ` is ${word("dtype", v)}`);
      if (word("variables", v)) item.append(` (${word("variables", v)})`);
      if (!rule) { item.append(low.test(word("dtype", v)) ? " in the model" : high.test(word("dtype", v)) ? " in the model; nothing decided about it" : ": it computes no floats"); return item; }
      item.append(": ", make("code", {}, rule), make("br"), rules[rule].words + (note ? `: ${note}` : ""));
      if (rules[rule].page) item.append(make("br"), make("code", {}, `amp-rewrite rule ${rule}`), " says more");
      if (entry) item.append(make("br"), make("span", { class: "entry" }, entry));
      return item;
    }
    function showOp(v) {
      chosen = v;
      mark();
      const list = make("dl", {});
      const heading = make("h3", { tabindex: "-1" }, label(v));
      fact(list, "name", nameOf(v));
      fact(list, "type", word("variables", v) || word("dtype", v));
      if (v < G.rows) {
        const steps = make("ol", { class: "reasons" });
        const seen = new Set();
        for (let at = v; at >= 0 && !seen.has(at); at = ops.because[at]) { seen.add(at); steps.append(reasonOf(at)); }
        fact(list, "why", steps);
      }
      if (G.flops && G.flops[v]) fact(list, "FLOPs", G.flops[v].toLocaleString("en"));
      if (G.errors && G.errors[v] !== null && v < G.rows) fact(list, "error share", `${(100 * G.errors[v]).toPrecision(3)} %`);
      const inputs = make("ul", {}), read = types(word("inputs", v));
      for (let i = 0; i < Math.max(read.length, ops.reads[v].length); i++) {
        const made = ops.reads[v][i], from = made >= 0 ? link(made) : read[i] ? "a weight or constant" : "left out";
        const on = (made >= 0 && castsOn.get(made * number + v)) || [];
        const item = make("li", {}, make("code", {}, read[i] || "–"), " ", from);
        for (const c of on) item.append(" ", castText(casts[c]));
        inputs.append(item);
      }
      if (inputs.firstChild) fact(list, "inputs", inputs);
      const made = types(word("outputs", v));
      if (made.length) fact(list, "outputs", make("code", {}, made.join(", ")));
      const by = [...new Set(readers[v] || [])];
      if (by.length) {
        const items = by.slice(0, 12).map((r) => make("li", {}, make("b", {}, word("op", r)), " ", link(r)));
        if (by.length > 12) items.push(make("li", {}, `and ${by.length - 12} more`));
        fact(list, "read by", make("ul", {}, ...items));
      }
      details.replaceChildren(closer(), heading, list);
      said.textContent = describe(v);
    }
    const closer = () => make("button", { class: "close", "aria-label": "Close details", onclick: () => { close(); back(); } }, "×");
    const back = () => nodes.has(current) && nodes.get(current).focus({ preventScroll: true });
    const castText = (cast) => make("span", { class: "casttext" }, `${cast.from} → ${cast.to}${cast.bytes !== undefined ? `, ${bytes(cast.bytes)} moved` : ", size unknown"}`);
    function showCasts(which) {
      const items = which.map((c) => {
        const cast = casts[c];
        const item = make("li", {}, make("code", {}, cast.value), make("br"), castText(cast), ` · ${cast.origin} · ${plural(cast.readers, "reader")}`, make("br"), words[cast.why]);
        if (cast.edges.length) item.append(make("br"), "from ", link(cast.edges[0]), " to ", link(cast.edges[1]));
        return item;
      });
      details.replaceChildren(closer(), make("h3", { tabindex: "-1" }, which.length > 1 ? `${which.length} Casts` : "Cast"), make("ul", { class: "castlist" }, ...items));
      said.textContent = `Cast ${casts[which[0]].from} to ${casts[which[0]].to} of ${casts[which[0]].value}`;
    }
    let castAt = -1;
    function nextCast(step) {
      if (!casts.length) { said.textContent = "no Casts"; return; }
      castAt = (Math.max(castAt, step < 0 ? 0 : -1) + step + casts.length) % casts.length;
      const cast = casts[castAt];
      if (cast.edges.length) {
        reveal(cast.edges[0]);
        const target = reveal(cast.edges[1]);
        chosen = target;
        mark();
        center(target);
      }
      showCasts([castAt]);
      said.textContent += ` (${castAt + 1} of ${casts.length})`;
    }

    // -- search --------------------------------------------------------------------------------------
    let hits = [], hitAt = -1;
    const search = make("input", { type: "search", placeholder: "name or type", "aria-label": "Search ops by name or type", size: 18 });
    const found = make("span", { class: "found", "aria-live": "polite" });
    function look() {
      const text = search.value.trim().toLowerCase();
      hits = [];
      hitAt = -1;
      const like = words.map((w) => w.toLowerCase().includes(text));
      if (text) for (let v = 0; v < number; v++) if (like[ops.op[v]] || nameOf(v).toLowerCase().includes(text)) hits.push(v);
      found.textContent = text ? plural(hits.length, "hit") : "";
      page = 0;
      if (table.open) fill();
    }
    let pause = 0;
    search.addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(look, 120); });
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        clearTimeout(pause);
        const before = hits.length && search.dataset.last === search.value;
        if (!before) look();
        search.dataset.last = search.value;
        if (hits.length) {
          hitAt = (event.shiftKey ? Math.max(hitAt, 0) - 1 + hits.length : hitAt + 1) % hits.length;
          goTo(hits[hitAt]);
          found.textContent = `${hitAt + 1} of ${hits.length}`;
        }
      } else if (event.key === "Escape") {
        search.value = "";
        look();
        back();
        event.stopPropagation();
      }
    });

    // -- keys ----------------------------------------------------------------------------------------
    const middle = (p) => { const b = boxes.get(p); return [b.x + b.w / 2, b.y + b.h / 2]; };
    function neighbor(p, key) {
      const inside = (q) => q >= number && open.has(q - number);
      if (key === "ArrowUp" || key === "ArrowDown") {
        if (inside(p)) return key === "ArrowDown" ? parts[p - number][0] : scopeOf(p) > 0 ? number + scopeOf(p) : undefined;
        const near = edges.filter((e) => (key === "ArrowUp" ? e.reader === p : e.source === p)).map((e) => (key === "ArrowUp" ? e.source : e.reader));
        if (near.length) return near[0];
        return key === "ArrowUp" && scopeOf(p) > 0 ? number + scopeOf(p) : undefined;
      }
      const shown = [...nodes.keys()].filter((q) => !inside(q));
      shown.sort((a, b) => middle(a)[1] - middle(b)[1] || middle(a)[0] - middle(b)[0]);
      const at = shown.indexOf(p);
      return shown[key === "ArrowRight" ? at + 1 : at - 1];
    }
    frame.addEventListener("focusin", (event) => { // a screen reader moves the focus without keys
      const g = event.target.closest("[data-part]");
      if (g && Number(g.dataset.part) !== current) focus(Number(g.dataset.part), true);
    });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || current === null) return;
      const key = event.key;
      if (key.startsWith("Arrow")) {
        const next = neighbor(current, key);
        if (next !== undefined && nodes.has(next)) { focus(next); sight(next); }
      } else if (key === "Enter" || key === " ") {
        const cast = event.target.closest("[data-cast]");
        if (cast) cast.dispatchEvent(new Event("click"));
        else act(current);
      }
      else if (key === "Escape") {
        if (close()) back();
        else if (current >= number && open.has(current - number)) toggle(current - number);
        else if (scopeOf(current) > 0) toggle(scopeOf(current));
      } else if (key === "/") search.focus();
      else if (key === "c" || key === "C") nextCast(key === "c" ? 1 : -1);
      else if (key === "+") zoom(1.25);
      else if (key === "-") zoom(0.8);
      else if (key === "0") fit(true);
      else return;
      event.preventDefault();
    });
    details.addEventListener("keydown", (event) => { if (event.key === "Escape") { close(); back(); } });

    // -- legend, toolbar, table ----------------------------------------------------------------------
    const keys = make("p", { class: "legend" });
    function legend() {
      const counts = shares[0];
      keys.replaceChildren(...mode.names.map((name, i) => (name && counts[i] ? make("span", { class: "key", "data-class": mode.colors[i], "data-count": counts[i], title: rules[name] ? rules[name].words : null }, make("i", { class: `swatch ${mode.colors[i]}` }), `${name} (${counts[i]}) `) : null)).filter(Boolean),
        make("span", { class: "key", "data-class": "cast", "data-count": casts.length }, make("i", { class: "swatch cast" }), `Casts (${casts.length})`));
    }
    const choice = make("select", { "aria-label": "Color ops by", onchange: () => { mode = modes[choice.value]; classify(); draw(); show(); } },
      ...Object.entries(modes).map(([name, m]) => make("option", { value: name }, m.title)));
    const button = (text, title, act) => make("button", { title, "aria-label": title, onclick: act }, text);
    function all(unfold) {
      open.clear();
      open.add(0);
      if (unfold) {
        let shown = parts[0].length;
        for (let s = 1; s < top.length && shown < MANY; s++) if (open.has(scopes.parent[s])) { open.add(s); shown += parts[s].length; }
        if (shown >= MANY) said.textContent = "too many ops to unfold all at once: the first scopes are open";
      }
      draw();
      fit(false);
    }
    const toolbar = make("div", { class: "toolbar", role: "toolbar", "aria-label": "Graph" },
      search, found,
      make("label", {}, "color by ", choice),
      button("next Cast", "Go to the next Cast", () => nextCast(1)),
      button("unfold all", "Unfold all scopes", () => all(true)), button("fold all", "Fold all scopes", () => all(false)),
      button("+", "Zoom in", () => zoom(1.25)), button("−", "Zoom out", () => zoom(0.8)), button("fit", "Fit the graph", () => fit(true)));

    const PAGE = 100;
    let page = 0;
    const body = make("div", {});
    const table = make("details", { class: "alternative", ontoggle: () => table.open && fill() }, make("summary", {}, "Ops as a table"), body);
    function fill() {
      const listed = search.value.trim() ? hits.filter((v) => v < G.rows) : null;
      const whole = listed ? listed.length : G.rows, first = page * PAGE, last = Math.min(whole, first + PAGE);
      const rows = [];
      for (let i = first; i < last; i++) {
        const v = listed ? listed[i] : i;
        rows.push(make("tr", {}, make("td", { class: "number" }, String(v)), make("td", {}, link(v)), make("td", {}, word("op", v)), make("td", {}, word("dtype", v)),
          make("td", {}, word("rule", v)), make("td", {}, word("note", v))));
      }
      const head = ["row", "op", "type", "element type", "rule", "note"].map((name) => make("th", { scope: "col" }, name));
      const turn = (step) => { page += step; fill(); };
      body.replaceChildren(
        make("p", {}, whole ? `${first + 1} to ${last} of ${whole} ` : "no op ",
          page ? button("previous", "Previous rows", () => turn(-1)) : null, " ", last < whole ? button("next", "Next rows", () => turn(1)) : null),
        make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ops" },
          make("table", { class: "table" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
    }
    const castBody = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Casts" });
    const castTable = make("details", { class: "alternative", ontoggle: () => {
      if (!castTable.open || castBody.firstChild) return;
      const head = ["Cast of", "from", "to", "bytes moved", "readers", "origin", "why"].map((name) => make("th", { scope: "col" }, name));
      const shown = casts.slice(0, 1000);
      const rows = shown.map((cast, c) => make("tr", {}, make("td", {}, make("button", { class: "link", onclick: () => { castAt = c - 1; nextCast(1); } }, cast.value)), make("td", {}, cast.from), make("td", {}, cast.to),
        make("td", { class: "number" }, cast.bytes !== undefined ? bytes(cast.bytes) : "unknown"), make("td", { class: "number" }, String(cast.readers)), make("td", {}, cast.origin), make("td", {}, words[cast.why])));
      castBody.append(make("table", { class: "table" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
      if (casts.length > shown.length) castBody.append(make("p", {}, `and ${casts.length - shown.length} more`));
    } }, make("summary", {}, `Casts as a table (${casts.length})`), castBody);

    details.append(hint());
    section.querySelector(".graph").replaceChildren(toolbar, keys, make("div", { class: "stage" }, frame, details), said, table, castTable);
    draw();
    fit(false);
    let width = frame.clientWidth;
    addEventListener("resize", () => { if (frame.clientWidth !== width) { width = frame.clientWidth; fit(false); } });
    addEventListener("beforeprint", () => {
      canvas.setAttribute("viewBox", `0 0 ${total.w + 60} ${total.h + 20}`);
      world.removeAttribute("transform");
    });
    addEventListener("afterprint", () => { canvas.removeAttribute("viewBox"); show(); });
  }

  if (data.graph) graph(data.graph, document.getElementById("graph"));
})();

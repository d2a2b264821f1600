const svgName = "http://www.w3.org/2000/svg";

/** Create an element with attributes and children; text is never parsed as markup. */
function make(tag, attributes, ...children) {
  const inSvg = /^(svg|g|rect|path|text|title|circle)$/.test(tag);
  const created = inSvg ? document.createElementNS(svgName, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) created.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) created.setAttribute(name, value);
  }
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

const button = (text, title, act) => make("button", { title, "aria-label": title, onclick: act }, text);

const plural = (number, one, many) => `${number} ${number === 1 ? one : many || one + "s"}`;

function bytes(number) {
  let unit = "B";
  for (const next of ["kB", "MB", "GB", "TB"]) if (number >= 1000) { number /= 1000; unit = next; }
  return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
}

const LOW_TYPE = /^b?float(16|8.*)$/, HIGH_TYPE = /^(float|double)/;
const shortType = (type) => type.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i");

/** Return the width of a text in columns: two for wide characters. */
const columnsOf = (c) => (c.codePointAt(0) >= 0x1100 && !GLYPHS.includes(c) ? 2 : 1);
const columns = (text) => [...text.slice(0, 200)].reduce((n, c) => n + columnsOf(c), 0);
const GLYPHS = "▼▲◆≠▸▾…";

/** Truncate a text to a number of columns, never within a character. */
function cut(text, limit) {
  if (columns(text) <= limit) return text;
  let kept = "", room = limit - 1;
  for (const c of text) { if ((room -= columnsOf(c)) < 0) break; kept += c; }
  return `${kept}…`;
}

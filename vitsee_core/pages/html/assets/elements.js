// Elements of a page, and numbers as its text.

const NS = "http://www.w3.org/2000/svg";

/** An element of SVG.
 * @param {string} name
 * @param {Record<string, string | number>} [attributes]
 * @param {Element | null} [parent]
 * @returns {SVGElement} */
export function el(name, attributes, parent) {
  const node = /** @type {SVGElement} */ (document.createElementNS(NS, name));
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, String(value));
  if (parent) parent.append(node);
  return node;
}

/** An element of HTML with a text, never markup.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {string} [text]
 * @param {Element | null} [parent]
 * @param {string} [cls]
 * @returns {HTMLElementTagNameMap[K]} */
export function html(name, text, parent, cls) {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  if (cls) node.className = cls;
  if (parent) parent.append(node);
  return node;
}

/** The element of this id, which the template has.
 * @param {string} id
 * @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page lacks #${id}`);
  return found;
}

/** Four digits of a number.
 * @param {number | null} v
 * @returns {string} */
export const number = (v) => v === null ? "no value"
  : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));

/** A value with its interval and count.
 * @param {number | null} value
 * @param {number | null} low
 * @param {number | null} high
 * @param {number | null} n
 * @returns {string} */
export function values(value, low, high, n) {
  let text = number(value);
  if (low !== null && high !== null) text += " (95 %: " + number(low) + " to " + number(high) + ")";
  if (n !== null) text += "\nn = " + n.toLocaleString("en");
  return text;
}

/** A text without its middle, where it is longer.
 * @param {string} text
 * @param {number} most
 * @returns {string} */
export const shorten = (text, most) => text.length <= most ? text : text.slice(0, Math.ceil(most / 2)) + "…" + text.slice(text.length - Math.floor(most / 2) + 1);

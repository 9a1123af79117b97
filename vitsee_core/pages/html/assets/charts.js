// Heatmaps and curves, as SVG whose marks say what they are.

import { el, html, number, shorten, values } from "./elements.js";
import { MAGMA, colourAt, css } from "./palettes.js";
import { label, pointable } from "./pointing.js";

/** @param {number} t */
const colourOf = (t) => css(colourAt(MAGMA, t));

/** Round numbers between two.
 * @param {number} low
 * @param {number} high
 * @param {number} most about so many
 * @returns {number[]} */
function ticks(low, high, most) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999) ?? 10 * power;
  /** @type {number[]} */
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-6 ? 0 : +v.toPrecision(10));
  return found;
}

/** A cell of a heatmap: value, low, high, n. A chart of cells, and one of lines; a point: x, value,
 * low, high, n, site, token.
 * @typedef {[number, number | null, number | null, number | null]} Cell
 * @typedef {{rows: string[], cols: string[], cells: (Cell | null)[][], range: [number, number], title: string, metric: string, x: string, y: string}} Heat
 * @typedef {[number, number, number | null, number | null, number | null, string, string]} Point
 * @typedef {{name: string, points: Point[], colour: number, baseline: boolean}} Line
 * @typedef {{lines: Line[], title: string, metric: string, heads: boolean}} Curves */

/** How wide the widest of these labels of a chart is, in pixels.
 * @param {HTMLElement} figure
 * @param {string[]} texts
 * @returns {number} */
function widest(figure, texts) {
  const place = el("svg", { width: 0, height: 0 }, figure);
  const own = /** @type {SVGTextElement} */ (el("text", {}, place));
  const found = texts.map((text) => { own.textContent = text; return own.getComputedTextLength() || text.length * 7; });
  place.remove();
  return Math.max(...found);
}

/** Sites by sites.
 * @param {HTMLElement} figure
 * @param {Heat} chart
 * @param {number} room in pixels */
export function heat(figure, chart, room) {
  const rows = chart.rows, cols = chart.cols, R = rows.length, C = cols.length;
  const names = { rows: rows.map((r) => shorten(r, 16)), cols: cols.map((c) => shorten(c, 15)) };
  const across = widest(figure, names.cols), left = 9 + Math.max(widest(figure, names.rows), across / 2 - 4);
  const below = 14 + across * 0.87 + 6;
  const side = Math.max(3, Math.min(34, (room - left - 6) / C, 340 / R));
  const W = left + C * side + 6, H = R * side + below + 6;
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `${chart.title}: ${R} by ${C} sites, arrow keys move` }, figure);
  svg.style.maxWidth = W + "px";
  const [low, high] = chart.range;
  /** @type {SVGElement[]} */
  const marks = [];
  for (let i = 0; i < R; i++) for (let j = 0; j < C; j++) {
    const cell = chart.cells[i][j], value = cell ? cell[0] : null;
    const box = el("rect", { x: left + j * side, y: (R - 1 - i) * side + 4, width: side + 0.3, height: side + 0.3 }, svg);
    if (value === null) box.setAttribute("class", "none"); else box.setAttribute("fill", colourOf((value - low) / (high - low)));
    label(box, `${chart.y} ${rows[i]} × ${chart.x} ${cols[j]}; ${chart.metric} ${cell ? values(...cell).replace("\n", "; ") : "no value"}`);
    marks.push(box);
  }
  const every = (/** @type {number} */ n) => Math.max(1, Math.ceil(n * 13 / (n * side)));
  for (let i = 0; i < R; i += every(R)) el("text", { x: left - 5, y: (R - 0.5 - i) * side + 8, "text-anchor": "end" }, svg).textContent = names.rows[i];
  for (let j = 0; j < C; j += every(C)) {
    const x = left + (j + 0.5) * side + 4, y = R * side + 11;
    el("text", { x, y, "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` }, svg).textContent = names.cols[j];
  }
  const ramp = html("div", "", figure, "ramp");
  html("span", number(low), ramp);
  const bar = el("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true", "shape-rendering": "crispEdges" }, ramp);
  for (let k = 0; k < 50; k++) el("rect", { x: k * 2, y: 0, width: 3, height: 10, fill: colourOf(k / 49) }, bar);
  html("span", number(high) + " " + chart.metric, ramp);
  /** @type {Record<string, number[]>} */
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
  pointable(svg, marks, (key, at) => {
    const d = step[key];
    if (!d) return undefined;
    const i = Math.floor(at / C) + d[0], j = at % C + d[1];
    return i < 0 || j < 0 || i >= R || j >= C ? undefined : i * C + j;
  });
}

/** @type {((r: number) => string)[]} */
const SHAPES = [
  (r) => `M0,${-r}A${r},${r} 0 1,1 0,${r}A${r},${r} 0 1,1 0,${-r}Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-r * 1.25}L${r * 1.15},${r * 0.9}H${-r * 1.15}Z`,
  (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0Z`,
  (r) => `M0,${r * 1.25}L${r * 1.15},${-r * 0.9}H${-r * 1.15}Z`,
];
/** Values against relative depth.
 * @param {HTMLElement} figure
 * @param {Curves} chart
 * @param {number} room in pixels
 * @param {boolean} [still] a picture, whose marks nobody points at */
export function curves(figure, chart, room, still) {
  const W = room, H = Math.max(190, Math.round(room * 0.58)), L = 52, R = 12, T = 10, B = 36;
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}` }, figure);
  if (!still) {
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `${chart.title} against relative depth: ${chart.lines.length} lines, arrow keys move`);
  }
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines) for (const p of line.points) {
    low = Math.min(low, p[1], p[2] ?? p[1]); high = Math.max(high, p[1], p[3] ?? p[1]);
  }
  if (low > 0 && low < 0.6 * high) low = 0;
  if (high <= low) { low -= Math.abs(low) * 0.1 + 0.1; high += Math.abs(high) * 0.1 + 0.1; }
  const pad = (high - low) * 0.05;
  high += pad; if (low !== 0) low -= pad;
  const x = (/** @type {number} */ v) => L + v * (W - L - R), y = (/** @type {number} */ v) => T + (high - v) / (high - low) * (H - T - B);
  for (const t of ticks(low, high, 5)) {
    el("line", { x1: L, x2: W - R, y1: y(t), y2: y(t), class: "grid" }, svg);
    el("text", { x: L - 6, y: y(t) + 4, "text-anchor": "end" }, svg).textContent = number(t);
  }
  for (const t of [0, 0.25, 0.5, 0.75, 1]) el("text", { x: x(t), y: H - B + 16, "text-anchor": "middle" }, svg).textContent = String(t);
  el("line", { x1: L, x2: W - R, y1: H - B, y2: H - B, class: "axis" }, svg);
  el("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, svg).textContent = "relative depth";
  /** @type {SVGElement[]} */
  const marks = [];
  /** @type {number[][]} */
  const of = [];
  chart.lines.forEach((line, k) => {
    const group = el("g", { class: line.baseline ? "cb" : "c" + line.colour % 7 }, svg), ps = line.points;
    const dash = line.baseline ? "5 4" : line.colour >= 7 ? "2 3" : "none";
    if (!chart.heads) {
      const banded = ps.filter((p) => p[2] !== null && p[3] !== null);
      if (banded.length > 1 && !line.baseline) el("path", { class: "band", d: "M" + banded.map((p) => `${x(p[0])},${y(p[3] ?? p[1])}`).join("L") + "L" + banded.slice().reverse().map((p) => `${x(p[0])},${y(p[2] ?? p[1])}`).join("L") + "Z" }, group);
      el("path", { class: "line", "stroke-dasharray": dash, d: "M" + ps.map((p) => `${x(p[0])},${y(p[1])}`).join("L") }, group);
    }
    ps.forEach((p, i) => {
      const shift = chart.heads ? (k - (chart.lines.length - 1) / 2) * 6 : 0;
      const mark = el("path", { class: "dot", d: SHAPES[line.colour % SHAPES.length](line.baseline ? 2.4 : 3.8), transform: `translate(${x(p[0]) + shift},${y(p[1])})` }, group);
      if (still) return;
      label(mark, [line.name, p[5] + (p[6] ? ", " + p[6] : ""), chart.metric + " " + values(p[1], p[2], p[3], p[4]).replace("\n", "; ")].join("; "));
      marks.push(mark); of.push([k, i]);
    });
  });
  /** @type {number[]} */
  const starts = []; { let n = 0; for (const line of chart.lines) { starts.push(n); n += line.points.length; } }
  if (chart.lines.length > 1 || chart.lines[0].name) {
    const key = html("ul", "", figure, "key");
    chart.lines.forEach((line, k) => {
      if (still && line.baseline) return;
      const item = html("li", "", key, line.baseline ? "cb" : "c" + line.colour % 7), icon = el("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, item);
      if (!chart.heads) el("path", { class: "line", "stroke-dasharray": line.baseline ? "5 4" : line.colour >= 7 ? "2 3" : "none", d: "M0,5H22" }, icon);
      el("path", { class: "dot", d: SHAPES[line.colour % SHAPES.length](3.6), transform: "translate(11,5)" }, icon);
      html("bdi", line.name, item);
    });
  }
  pointable(svg, marks, (key, at) => {
    const [k, i] = of[at];
    if (key === "ArrowRight") return i + 1 < chart.lines[k].points.length ? at + 1 : undefined;
    if (key === "ArrowLeft") return i > 0 ? at - 1 : undefined;
    const to = key === "ArrowDown" ? k + 1 : key === "ArrowUp" ? k - 1 : -1;
    return chart.lines[to] ? starts[to] + Math.min(i, chart.lines[to].points.length - 1) : undefined;
  });
}

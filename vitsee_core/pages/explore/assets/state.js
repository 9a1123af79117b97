// What is shown, and the address that leads to it. No document.

/** patch: a cell of the reference grid; box: row and column of its first and last cell, or null;
 * layer: a place among the depths; head: of the class token's attention, -1 for the patch's;
 * step: the one model that is shown of a training's, -1 for all models.
 * @typedef {{image: number, patch: number, box: number[] | null, layer: number, view: string, scale: string, head: number, step: number}} State
 * @typedef {{images: number, grid: number[], layers: number, views: string[], heads: number, steps: number}} Limits */

export const SCALES = ["shared", "map"];

/** @param {string | undefined | null} text
 * @param {number} low
 * @param {number} high
 * @param {number} otherwise */
const whole = (text, low, high, otherwise) =>
  text && /^-?\d{1,9}$/.test(text) ? Math.min(Math.max(Number(text), low), high) : otherwise;

/** What an address asks for, as far as the page has it.
 * @param {string} hash
 * @param {State} now
 * @param {Limits} limits
 * @returns {State} */
export function readState(hash, now, limits) {
  const asked = new URLSearchParams(hash.replace(/^#/, "")), [rows, cols] = limits.grid;
  const box = (asked.get("box") ?? "").split(",").map((part, i) => whole(part, 0, (i % 2 ? cols : rows) - 1, NaN));
  const view = asked.get("view"), scale = asked.get("scale");
  return {
    image: whole(asked.get("image"), 0, limits.images - 1, now.image),
    patch: whole(asked.get("patch"), 0, rows * cols - 1, now.patch),
    box: box.length === 4 && !box.some(Number.isNaN) && box[0] <= box[2] && box[1] <= box[3] ? box : null,
    layer: whole(asked.get("layer"), 0, limits.layers - 1, now.layer),
    view: view && limits.views.includes(view) ? view : now.view,
    scale: scale && SCALES.includes(scale) ? scale : SCALES[0],
    head: whole(asked.get("head"), -1, limits.heads - 1, -1),
    step: limits.steps ? whole(asked.get("step"), 0, limits.steps - 1, now.step) : -1,
  };
}

/** The address of a state.
 * @param {State} state
 * @returns {string} */
export function writeState(state) {
  /** @type {Record<string, string>} */
  const parts = { image: String(state.image), patch: String(state.patch), layer: String(state.layer) };
  if (state.view !== "cosine") parts.view = state.view;
  if (state.scale !== SCALES[0]) parts.scale = state.scale;
  if (state.box) parts.box = state.box.join(",");
  if (state.head >= 0) parts.head = String(state.head);
  if (state.step >= 0) parts.step = String(state.step);
  return "#" + Object.entries(parts).map((pair) => pair.join("=")).join("&");
}

/** The depths of several models' layers, each once, ascending.
 * @param {number[][]} models
 * @returns {number[]} */
export function depthsOf(models) {
  const found = [...new Set(models.flat().map((d) => Math.round(d * 1e4) / 1e4))];
  return found.sort((a, b) => a - b);
}

/** The place of the depth that is nearest, the earlier of two.
 * @param {number[]} depths
 * @param {number} depth
 * @returns {number} */
export function nearestDepth(depths, depth) {
  let best = 0;
  depths.forEach((d, i) => { if (Math.abs(d - depth) < Math.abs(depths[best] - depth) - 1e-6) best = i; });
  return best;
}

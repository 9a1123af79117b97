// What a view shows of a layer: numbers or colours by cell. No document.

import { attentionRow, cellAt, cellsIn, coarseOf, cosines, middleOf, queryOf } from "./arithmetic.js";

/** A layer of a view: a site, or a block where it is attention.
 * @typedef {import("./packed.js").Site} Site
 * @typedef {import("./packed.js").Block} Block
 * @typedef {import("./packed.js").Model} Model
 * @typedef {import("./arithmetic.js").Grid} Grid
 * @typedef {{grid: Grid, short: string, words: string, relDepth: number, site: Site | null, block: Block | null}} Layer */

/** values: by cell, NaN where there is none, or null; colours: red, green, blue, alpha, or null; own:
 * the chosen cells; asked: of a coarse grid the cell that stands for these, or -1.
 * @typedef {{values: Float32Array | null, colours: Uint8ClampedArray | null, own: number[], asked: number}} LayerMap */

/** The place that is chosen: an image, a box of its frame (y0, x0, y1, x1), a head or -1.
 * @typedef {{image: number, box: number[], head: number}} Chosen */

const PRECISION = 0.02; // of a box's edges, in cells of the reference grid

/** The layers of a model that a view shows, by depth.
 * @param {Model} model
 * @param {string} view
 * @param {number} head
 * @returns {Layer[]} */
export function layersOf(model, view, head) {
  if (view === "attention") {
    return model.blocks.filter((block) => head >= 0 ? head < block.about.heads : block.patchMost !== null)
      .map((block) => ({ grid: block.about, short: block.about.short, words: block.about.words, relDepth: block.about.rel_depth, site: null, block }));
  }
  const has = /** @type {(site: Site) => boolean} */ (view === "lens" ? (s) => s.classes !== null : view === "pca" ? (s) => s.colours !== null : () => true);
  return model.sites.filter(has)
    .map((site) => ({ grid: site.about, short: site.about.short, words: site.about.words, relDepth: site.about.rel_depth, site, block: null }));
}

/** The box of a cell, or of the cells from one to another, of a grid.
 * @param {Grid} grid
 * @param {number} image
 * @param {number[]} cells row and column of the first and last
 * @returns {number[]} */
export function boxOf(grid, image, [r0, c0, r1, c1]) {
  const cols = grid.grid[1];
  const [y0, x0] = middleOf(grid, image, r0 * cols + c0), [y1, x1] = middleOf(grid, image, r1 * cols + c1);
  const [top, left, bottom, right] = grid.edges[grid.edges.length > 1 ? image : 0];
  const dy = (bottom - top) / grid.grid[0] * (0.5 - PRECISION), dx = (right - left) / cols * (0.5 - PRECISION);
  return [y0 - dy, x0 - dx, y1 + dy, x1 + dx];
}

/** The cells of a layer that are chosen: all in a box, or the one that a single cell's middle is in.
 * @param {Grid} grid
 * @param {Chosen} chosen
 * @param {boolean} several
 * @returns {number[]} */
export function chosenCells(grid, { image, box }, several) {
  if (several) return cellsIn(grid, image, box);
  const cell = cellAt(grid, image, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2);
  return cell < 0 ? [] : [cell];
}

/** A layer as a view shows it.
 * @param {Layer} layer
 * @param {string} view
 * @param {Chosen} chosen
 * @param {boolean} several a box is chosen
 * @param {(cls: number) => number[]} colourOf a class
 * @returns {LayerMap} */
export function mapOf(layer, view, chosen, several, colourOf) {
  const { site, block, grid } = layer, image = chosen.image;
  const own = chosenCells(grid, chosen, several), n = grid.grid[0] * grid.grid[1];
  /** @type {LayerMap} */
  const found = { values: null, colours: null, own, asked: -1 };
  if (block) {
    const about = block.about;
    if (chosen.head >= 0) {
      found.values = attentionRow(block.most, block.values, image * about.heads + chosen.head, n);
    } else if (about.queries && block.patchMost && block.patchValues) {
      const cell = own[own.length >> 1], query = cell === undefined ? -1 : coarseOf(about.grid, about.step, cell);
      found.asked = about.queries[query] ?? -1;
      found.values = query < 0 ? new Float32Array(n).fill(NaN)
        : attentionRow(block.patchMost, block.patchValues, image * about.queries.length + query, n);
    }
  } else if (site && view === "cosine") {
    const query = queryOf(site.tokens, n, image, own);
    found.values = query ? cosines(site.tokens, n, query, image) : new Float32Array(n).fill(NaN);
  } else if (site && view === "norms") {
    found.values = site.tokens.norms.subarray(image * n, (image + 1) * n);
  } else if (site && view === "pca" && site.colours) {
    found.colours = new Uint8ClampedArray(4 * n);
    for (let t = 0; t < n; t++) {
      if (Number.isNaN(site.tokens.norms[image * n + t])) continue;
      const at = 3 * (image * n + t);
      found.colours.set([site.colours[at], site.colours[at + 1], site.colours[at + 2], 255], 4 * t);
    }
  } else if (site && view === "lens" && site.classes && site.shares) {
    found.colours = new Uint8ClampedArray(4 * n);
    const start = image * (1 + n) + 1;
    for (let t = 0; t < n; t++) {
      if (Number.isNaN(site.tokens.norms[image * n + t])) continue;
      found.colours.set([...colourOf(site.classes[start + t]), 40 + site.shares[start + t] * 215 / 255], 4 * t);
    }
  }
  return found;
}

/** Cosines of the chosen patches with all of every other image.
 * @param {Site} site
 * @param {Chosen} chosen
 * @param {boolean} several
 * @param {number} nImages
 * @returns {{image: number, values: Float32Array}[]} */
export function elsewhere(site, chosen, several, nImages) {
  const query = queryOf(site.tokens, site.cells, chosen.image, chosenCells(site.about, chosen, several));
  if (!query) return [];
  const others = [...Array(nImages).keys()].filter((image) => image !== chosen.image);
  return others.map((image) => ({ image, values: cosines(site.tokens, site.cells, query, image) }));
}

// What is shown of which layer, from the data and the state: maps, their ranges and colours.

import { attentionRow, nCells, rangeOf } from "./arithmetic.js";
import { coloursOf, paintCells } from "./drawing.js";
import { boxOf, elsewhere, layersOf, mapOf } from "./maps.js";
import { depthsOf, nearestDepth } from "./state.js";
import { MAGMA, VIRIDIS } from "../../html/assets/palettes.js";

/** @typedef {import("./packed.js").About} About
 * @typedef {import("./packed.js").Model} Model
 * @typedef {import("./packed.js").Site} Site
 * @typedef {import("./arithmetic.js").Grid} Grid
 * @typedef {import("./maps.js").Layer} Layer
 * @typedef {import("./maps.js").LayerMap} LayerMap
 * @typedef {import("./maps.js").Chosen} Chosen
 * @typedef {import("./state.js").State} State
 * @typedef {import("./drawing.js").Box} Box */

/** Of classes, the commonest first; then grey. */
const CLASS_COLOURS = [[0, 114, 178], [213, 94, 0], [0, 158, 115], [204, 121, 167], [230, 159, 0], [86, 180, 233], [240, 228, 66]];
const OTHER_CLASS = [128, 128, 128];
const SIDE = 14; // cells of a side: the grid that patches are counted on is the one nearest to it

export class Scene {
  /** @param {About} about
   * @param {Model[]} models
   * @param {HTMLImageElement[]} photos
   * @param {State} state */
  constructor(about, models, photos, state) {
    this.about = about;
    this.models = models;
    this.photos = photos;
    this.state = state;
    this.reference = Scene.referenceOf(models);
    this.depths = depthsOf(models.map((model) => model.sites.map((site) => site.about.rel_depth)));
    /** @type {Map<string, LayerMap>} */
    this.maps = new Map();
    /** @type {Map<string, Layer[]>} */
    this.known = new Map();
    this.key = "";
    /** @type {Map<string, number[]>} */
    this.colours = new Map();
    this.coloured = -1;
  }

  /** The grid that patches are counted on: the first model's that has neither too few nor too many.
   * @param {Model[]} models
   * @returns {Grid} */
  static referenceOf(models) {
    const grids = models[0].sites.map((site) => /** @type {Grid} */ (site.about));
    const off = (/** @type {Grid} */ at) => Math.abs(Math.log(Math.max(...at.grid) / SIDE));
    return grids.reduce((best, at) => off(at) < off(best) - 1e-9 ? at : best);
  }

  /** @returns {boolean} whether several patches are chosen */
  get several() { return this.state.box !== null; }

  /** @returns {Chosen} */
  get chosen() {
    const { image, patch, box, head } = this.state, cols = this.reference.grid[1];
    const row = Math.floor(patch / cols), col = patch % cols;
    return { image, box: boxOf(this.reference, image, box ?? [row, col, row, col]), head };
  }

  /** Whether a model is shown: each is, but of a training that of the chosen step alone.
   * @param {number} model
   * @returns {boolean} */
  shows(model) { return this.state.step < 0 || this.state.step === model; }

  /** @param {number} model
   * @returns {Layer[]} */
  layers(model) {
    const { view, head } = this.state, key = [model, view, head].join();
    let found = this.known.get(key);
    if (!found) this.known.set(key, found = layersOf(this.models[model], view, head));
    return found;
  }

  /** The layer of a model that is nearest to the chosen depth; -1 of none.
   * @param {number} model
   * @returns {number} */
  current(model) {
    const layers = this.layers(model);
    return layers.length ? nearestDepth(layers.map((layer) => layer.relDepth), this.depths[this.state.layer]) : -1;
  }

  /** The site of a model that is nearest to the chosen depth.
   * @param {number} model
   * @returns {Site} */
  site(model) {
    const sites = this.models[model].sites;
    return sites[nearestDepth(sites.map((site) => site.about.rel_depth), this.depths[this.state.layer])];
  }

  /** @param {number} model
   * @param {number} layer
   * @returns {LayerMap} */
  map(model, layer) {
    const { image, patch, box, view, head } = this.state, key = [image, patch, box, view, head].join();
    if (key !== this.key) { this.maps.clear(); this.key = key; }
    const name = `${model},${layer}`;
    let found = this.maps.get(name);
    if (!found) {
      const colour = (/** @type {number} */ cls) => this.colourOf(model, cls);
      this.maps.set(name, found = mapOf(this.layers(model)[layer], view, this.chosen, this.several, colour));
    }
    return found;
  }

  /** Cosines with all other images at the chosen depth.
   * @param {number} model */
  elsewhere(model) {
    return elsewhere(this.site(model), this.chosen, this.several, this.about.images.length);
  }

  /** The numbers of the darkest and the brightest colour of a layer; null where it has no numbers.
   * @param {number} model
   * @param {number} layer
   * @returns {number[] | null} */
  range(model, layer) {
    const { view, scale } = this.state, map = this.map(model, layer);
    if (!map.values) return null;
    if (scale === "map") {
      const own = view === "cosine" ? new Set(map.own) : new Set();
      const found = rangeOf([map.values], (i) => own.has(i));
      return found && (view === "attention" ? [0, found[1]] : found);
    }
    const every = view === "norms" ? [model] : [...this.models.keys()];
    const maps = every.flatMap((k) => this.layers(k).map((_, i) => this.map(k, i).values));
    const found = rangeOf(maps.filter((values) => values !== null));
    return found && (view === "cosine" ? [Math.min(found[0], 0.99), 1] : view === "attention" ? [0, found[1]] : found);
  }

  /** A state that asks for attention of patches where no store has it: that of the first head.
   * @param {State} state
   * @returns {State} */
  withAttention(state) {
    const blocks = this.models.flatMap((model) => model.blocks);
    const lacking = state.view === "attention" && state.head < 0 && !blocks.some((block) => block.patchMost);
    return lacking && blocks.length ? { ...state, head: 0 } : state;
  }

  /** The palette of the view's numbers. */
  get palette() { return this.state.view === "cosine" ? VIRIDIS : MAGMA; }

  /** Draw a layer's map.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} model
   * @param {number} layer
   * @param {number[] | null} range
   * @param {string} none */
  paint(context, box, model, layer, range, none) {
    const { grid } = this.layers(model)[layer], map = this.map(model, layer);
    const colours = map.colours ?? (map.values && range ? coloursOf(map.values, this.palette, range[0], range[1])
      : new Uint8ClampedArray(4 * nCells(grid)));
    paintCells(context, box, grid, this.state.image, colours, none);
  }

  /** Attention of the class token (or the mean of patches) by a head of a block.
   * @param {number} model
   * @param {number} block
   * @param {number} head */
  ofHead(model, block, head) {
    const own = this.models[model].blocks[block];
    return attentionRow(own.most, own.values, this.state.image * own.about.heads + head, own.cells);
  }

  /** What a class is called.
   * @param {number} model
   * @param {number} cls */
  className(model, cls) { return this.about.classes[model][String(cls)] ?? `class ${cls}`; }

  /** What an image's label is called; "" without one.
   * @param {number} image */
  label(image) { return this.about.labels[String(this.about.images[image].label)] ?? ""; }

  /** @param {number} model
   * @param {number} cls */
  colourOf(model, cls) { return this.classColours().get(this.className(model, cls)) ?? OTHER_CLASS; }

  /** The commonest classes of the image's patches, in all models and layers, and their colours.
   * @returns {Map<string, number[]>} */
  classColours() {
    const image = this.state.image;
    if (image === this.coloured) return this.colours;
    /** @type {Map<string, number>} */
    const counts = new Map();
    this.models.forEach((model, k) => model.sites.forEach((site) => {
      if (!site.classes) return;
      for (let t = 1; t <= site.cells; t++) {
        const name = this.className(k, site.classes[image * (1 + site.cells) + t]);
        counts.set(name, (counts.get(name) ?? 0) + 1 / site.cells);
      }
    }));
    const order = [...counts].sort((a, b) => b[1] - a[1]).slice(0, CLASS_COLOURS.length);
    this.colours = new Map(order.map(([name], i) => [name, CLASS_COLOURS[i]]));
    this.coloured = image;
    return this.colours;
  }
}

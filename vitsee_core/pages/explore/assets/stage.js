// The photograph, the maps at the chosen layer, the strips over all layers, what colours mean.

import { cellAt, medianOf } from "./arithmetic.js";
import { CHOSEN, aroundCells, fitted, outline, paintPhoto, surface, write } from "./drawing.js";
import { chosenCells } from "./maps.js";
import { colourAt, css } from "../../html/assets/palettes.js";
import { html, number } from "../../html/assets/elements.js";
import { hideTip, showTip } from "../../html/assets/pointing.js";

/** @typedef {import("./scene.js").Scene} Scene
 * @typedef {import("./drawing.js").Box} Box
 * @typedef {import("./arithmetic.js").Grid} Grid
 * @typedef {{none: string, soft: string, ink: string, accent: string, card: string}} Theme */

/** Something drawn that is pointed at: where a frame is, and of which model and layer.
 * @typedef {{box: Box, model: number, layer: number, image: number}} Target */

const GAP = 6, LABEL = 16, LARGEST = 360, TILE = { least: 56, most: 150 };

/** What is drawn where on each canvas.
 * @type {WeakMap<HTMLCanvasElement, Target[]>} */
export const targets = new WeakMap();

/** @param {Target} t
 * @param {number} x
 * @param {number} y
 * @param {number} [slack] */
const within = (t, x, y, slack = 0) =>
  x >= t.box.x - slack && y >= t.box.y - slack && x < t.box.x + t.box.w + slack && y < t.box.y + t.box.h + slack;

/** The target at a place of the window, and the place (y, x) on its frame.
 * @param {HTMLCanvasElement} canvas
 * @param {MouseEvent} event
 * @returns {{target: Target, y: number, x: number} | null} */
export function pointed(canvas, event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const target = targets.get(canvas)?.find((t) => within(t, x, y, GAP / 2));
  return target ? { target, y: (y - target.box.y) / target.box.h, x: (x - target.box.x) / target.box.w } : null;
}

/** Say what is under the pointer.
 * @param {HTMLCanvasElement} canvas
 * @param {(found: {target: Target, y: number, x: number}) => string} say */
export function hovering(canvas, say) {
  canvas.addEventListener("pointermove", (e) => {
    const found = e.pointerType === "mouse" ? pointed(canvas, e) : null, text = found && say(found);
    if (text) showTip(text, e.clientX, e.clientY); else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
}

/** What a map says of a place.
 * @param {Scene} scene
 * @param {{target: Target, y: number, x: number}} found
 * @returns {string} */
export function sayPlace(scene, { target, y, x }) {
  const layer = scene.layers(target.model)[target.layer], { image } = scene.state;
  const cell = cellAt(layer.grid, image, y, x);
  if (cell < 0) return "";
  const at = `patch ${Math.floor(cell / layer.grid.grid[1])},${cell % layer.grid.grid[1]}`;
  const map = scene.map(target.model, target.layer), what = `${scene.models[target.model].about.name}, ${layer.words}\n${at}`;
  if (map.values) return `${what}: ${Number.isNaN(map.values[cell]) ? "no value" : number(map.values[cell])}`;
  const site = layer.site;
  if (scene.state.view === "lens" && site?.classes && site.shares) {
    const t = image * (1 + site.cells) + 1 + cell;
    return `${what}: ${scene.className(target.model, site.classes[t])} (${Math.round(site.shares[t] / 2.55)} %)`;
  }
  return what;
}

/** The line around the chosen patches of a layer.
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Grid} grid
 * @param {Box} box
 * @param {number} width */
function markChosen(context, scene, grid, box, width) {
  const own = chosenCells(grid, scene.chosen, scene.several);
  if (own.length) outline(context, aroundCells(box, grid, scene.state.image, own), width, CHOSEN);
}

/** @param {Scene} scene
 * @param {HTMLCanvasElement} canvas
 * @param {Theme} theme
 * @param {number} room */
export function drawPhoto(scene, canvas, theme, room) {
  const { image } = scene.state, about = scene.about.images[image], side = Math.min(room, LARGEST);
  const w = Math.min(side, LARGEST / about.aspect), h = w * about.aspect;
  const context = surface(canvas, w, h), box = { x: 0, y: 0, w, h };
  paintPhoto(context, box, scene.photos[image], about.edges, theme.none);
  if (!about.picture) write(context, "the picture cannot be read any more", w / 2, h / 2, theme.ink);
  markChosen(context, scene, scene.reference, box, 2.5);
  targets.set(canvas, [{ box, model: 0, layer: 0, image }]);
  const [row, col] = patchOf(scene);
  canvas.setAttribute("aria-label", `Photograph ${about.id}, patch row ${row}, column ${col}: arrow keys move it, with Shift they stretch a box, Page Up and Page Down change the layer`);
}

/** Row and column of the chosen patch on the reference grid.
 * @param {Scene} scene */
export function patchOf(scene) {
  const cols = scene.reference.grid[1];
  return [Math.floor(scene.state.patch / cols), scene.state.patch % cols];
}

/** The map of a model at the chosen layer.
 * @param {Scene} scene
 * @param {HTMLCanvasElement} canvas
 * @param {number} model
 * @param {Theme} theme
 * @param {number} room */
export function drawStage(scene, canvas, model, theme, room) {
  const { image } = scene.state, aspect = scene.about.images[image].aspect, layer = scene.current(model);
  const w = Math.min(room, LARGEST, LARGEST / aspect), h = w * aspect, box = { x: 0, y: 0, w, h };
  const context = surface(canvas, w, h);
  scene.paint(context, box, model, layer, scene.range(model, layer), theme.none);
  const grid = scene.layers(model)[layer].grid, map = scene.map(model, layer);
  if (map.asked >= 0 && !map.own.includes(map.asked)) outline(context, aroundCells(box, grid, image, [map.asked]), 1.5, "#fff", [3, 3]);
  markChosen(context, scene, grid, box, 2.5);
  targets.set(canvas, [{ box, model, layer, image }]);
}

/** How tiles of at most a size lie in a width: columns, rows, the side of one.
 * @param {number} n
 * @param {number} room
 * @param {{least: number, most: number}} size
 * @returns {{cols: number, rows: number, side: number}} */
export function tiling(n, room, size) {
  const most = Math.max(1, Math.min(n, Math.floor((room + GAP) / (size.least + GAP))));
  const rows = Math.ceil(n / most), cols = Math.ceil(n / rows);
  return { cols, rows, side: Math.max(8, Math.min(size.most, (room + GAP) / cols - GAP)) };
}

/** The places of tiles, below each a line of text.
 * @param {number} n
 * @param {{cols: number, side: number}} how
 * @param {number} aspect
 * @returns {Box[]} */
export function tilesOf(n, { cols, side }, aspect) {
  const high = Math.min(side, aspect > 1 ? side : side * aspect);
  return Array.from({ length: n }, (_, i) => {
    const box = fitted((i % cols) * (side + GAP), 0, side, aspect);
    return { ...box, y: Math.floor(i / cols) * (high + LABEL + GAP) + 3 };
  });
}

/** The maps of all layers of a model.
 * @param {Scene} scene
 * @param {HTMLCanvasElement} canvas
 * @param {number} model
 * @param {Theme} theme
 * @param {number} room */
export function drawStrip(scene, canvas, model, theme, room) {
  const { image } = scene.state, aspect = scene.about.images[image].aspect, layers = scene.layers(model);
  const how = tiling(layers.length, room - 6, TILE), tiles = tilesOf(layers.length, how, aspect);
  const last = tiles[tiles.length - 1], context = surface(canvas, room, last.y + last.h + LABEL + 2);
  const shared = scene.state.scale === "shared" ? scene.range(model, 0) : null, now = scene.current(model);
  targets.set(canvas, layers.map((layer, i) => {
    const box = { ...tiles[i], x: tiles[i].x + 3 };
    scene.paint(context, box, model, i, shared ?? scene.range(model, i), theme.none);
    markChosen(context, scene, layer.grid, box, 1.5);
    if (i === now) outline(context, { x: box.x - 1.5, y: box.y - 1.5, w: box.w + 3, h: box.h + 3 }, 2, theme.accent);
    write(context, below(scene, model, i), box.x + box.w / 2, box.y + box.h + 13, i === now ? theme.accent : theme.soft, "center", i === now ? "700" : "400");
    return { box, model, layer: i, image };
  }));
  const names = layers.map((layer) => layer.words);
  canvas.setAttribute("aria-label", `${scene.models[model].about.name}: ${layers.length} layers, ${names[0]} to ${names[names.length - 1]}; ${names[now]} is chosen`);
}

/** What stands below a tile.
 * @param {Scene} scene
 * @param {number} model
 * @param {number} i */
function below(scene, model, i) {
  const layer = scene.layers(model)[i], { view } = scene.state;
  if (view === "norms") return `${layer.short} · ${number(+medianOf(scene.map(model, i).values ?? new Float32Array()).toPrecision(2))}`;
  if (view === "pca" && layer.site?.about.explained != null) return `${layer.short} · ${Math.round(100 * layer.site.about.explained)} %`;
  return layer.short;
}

/** What colours mean.
 * @param {Scene} scene
 * @param {HTMLElement} place */
export function drawLegend(scene, place) {
  place.replaceChildren();
  const { view, scale } = scene.state, model = [...scene.models.keys()].find((k) => scene.layers(k).length);
  if (model === undefined) return;
  if (view === "pca") {
    html("span", "like colours are like features; below each layer, the variance that the three components explain", place);
  } else if (view === "lens") {
    for (const [name, colour] of scene.classColours()) {
      const item = html("span", "", place);
      const swatch = html("canvas", "", item, "swatch");
      const context = surface(swatch, 12, 12);
      context.fillStyle = css(colour);
      context.fillRect(0, 0, 12, 12);
      html("bdi", name, item);
    }
    html("span", "grey: other classes; fainter: a smaller share", place);
  } else {
    const range = scene.range(model, scene.current(model)), bar = html("span", "", place, "bar");
    const what = { cosine: "cosine", attention: "attention", norms: "length of the features" }[view] ?? "";
    const one = scale === "shared" && view !== "norms";
    html("span", one && range ? number(+range[0].toPrecision(2)) : "lowest", bar);
    const context = surface(html("canvas", "", bar), 150, 10);
    for (let i = 0; i < 150; i++) { context.fillStyle = css(colourAt(scene.palette, i / 149)); context.fillRect(i, 0, 1.5, 10); }
    html("span", one && range ? number(+range[1].toPrecision(2)) : "highest", bar);
    const over = one ? "one scale for all models and layers" : scale === "shared" ? "one scale for each model" : "each map over its own range";
    html("span", `${what}, ${over}${view === "norms" ? "; below each layer, the median" : ""}`, place);
  }
}

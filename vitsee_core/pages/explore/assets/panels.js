// Below the maps: other images, heads, numbers over depth, errors; and the row of images.

import { cosines, medianOf, nearest, queryOf, rangeOf, reachOf } from "./arithmetic.js";
import { aroundCells, coloursOf, fitted, outline, paintCells, paintPhoto, surface, write } from "./drawing.js";
import { chosenCells } from "./maps.js";
import { targets, tilesOf, tiling } from "./stage.js";
import { MAGMA, VIRIDIS } from "../../html/assets/palettes.js";
import { curves } from "../../html/assets/charts.js";
import { html, number } from "../../html/assets/elements.js";

/** @typedef {import("./scene.js").Scene} Scene
 * @typedef {import("./stage.js").Theme} Theme
 * @typedef {import("../../html/assets/charts.js").Point} Point */

const BEST = 5, OVER = [0.3, 0.8], THUMB = 68, LEFT = 30;
const OTHERS = { least: 72, most: 120 }, HEADS = { least: 20, most: 64 };
export const SECOND = "#ffd24d"; // the outline of similar patches after the first

/** @param {Scene} scene
 * @param {HTMLElement} place
 * @param {Theme} theme */
export function drawFilm(scene, place, theme) {
  scene.about.images.forEach((about, image) => {
    const button = /** @type {HTMLButtonElement} */ (place.children[image]), canvas = button.querySelector("canvas");
    button.setAttribute("aria-pressed", String(image === scene.state.image));
    if (!canvas) return;
    const context = surface(canvas, THUMB, THUMB);
    paintPhoto(context, fitted(0, 0, THUMB, about.aspect), scene.photos[image], about.edges, theme.none);
  });
}

/** A button of each image.
 * @param {Scene} scene
 * @param {HTMLElement} place
 * @param {(image: number) => void} choose */
export function makeFilm(scene, place, choose) {
  scene.about.images.forEach((about, image) => {
    const button = html("button", "", place), name = scene.label(image);
    button.type = "button";
    button.title = name ? `${about.id}: ${name}` : about.id;
    button.setAttribute("aria-label", `image ${image}: ${button.title}`);
    html("canvas", "", button);
    html("bdi", name || about.id, html("span", "", button));
    button.addEventListener("click", () => choose(image));
  });
}

/** The other images, with the cosine over each photograph.
 * @param {Scene} scene
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLElement} said
 * @param {number} model
 * @param {Theme} theme
 * @param {number} room */
export function drawElsewhere(scene, canvas, said, model, theme, room) {
  const site = scene.site(model), maps = scene.elsewhere(model), { images } = scene.about;
  const best = nearest(maps, BEST), range = rangeOf(maps.map((one) => one.values)) ?? [0, 1];
  const how = tiling(images.length - 1, room - 4, OTHERS), tiles = tilesOf(images.length - 1, { cols: how.cols, side: how.side }, 1);
  const last = tiles[tiles.length - 1], context = surface(canvas, room, last.y + last.h + 18);
  targets.set(canvas, maps.map(({ image, values }, i) => {
    const about = images[image], box = { ...fitted(tiles[i].x + 2, tiles[i].y, how.side, about.aspect) };
    paintPhoto(context, box, scene.photos[image], about.edges, theme.none, true);
    paintCells(context, box, site.about, image, coloursOf(values, VIRIDIS, range[0], range[1], OVER), "");
    best.map((one, rank) => ({ ...one, rank })).filter((one) => one.image === image).reverse()
      .forEach(({ cell, rank }) => outline(context, aroundCells(box, site.about, image, [cell]), rank ? 1.5 : 2.5, rank ? SECOND : "#fff"));
    write(context, scene.label(image) || about.id, tiles[i].x + 2 + how.side / 2, tiles[i].y + how.side + 13, theme.soft, "center", "400", how.side);
    return { box, model, layer: 0, image };
  }));
  const name = (/** @type {number} */ image) => scene.label(image) ? `${images[image].id} (${scene.label(image)})` : images[image].id;
  said.textContent = best.length ? `most similar: ${best.slice(0, 3).map((one) => `${one.value.toFixed(2)} in ${name(one.image)}`).join(", ")}` : "the chosen patch has no direction here";
  canvas.setAttribute("aria-label", `${scene.models[model].about.name}, ${site.about.words}: ${said.textContent}`);
}

/** Attention of the class token (or the mean of patches), blocks by heads.
 * @param {Scene} scene
 * @param {HTMLCanvasElement} canvas
 * @param {number} model
 * @param {Theme} theme
 * @param {number} room */
export function drawHeads(scene, canvas, model, theme, room) {
  const { blocks } = scene.models[model], { image, head, view } = scene.state, aspect = scene.about.images[image].aspect;
  const most = Math.max(...blocks.map((block) => block.about.heads));
  const side = Math.max(HEADS.least, Math.min(HEADS.most, (room - LEFT) / most - 3)), high = aspect > 1 ? side : side * aspect;
  const context = surface(canvas, room, 16 + blocks.length * (high + 3));
  const depth = scene.depths[scene.state.layer];
  const now = blocks.reduce((b, block, i) => Math.abs(block.about.rel_depth - depth) < Math.abs(blocks[b].about.rel_depth - depth) - 1e-6 ? i : b, 0);
  for (let h = 0; h < most; h++) write(context, String(h), LEFT + h * (side + 3) + side / 2, 11, theme.soft);
  targets.set(canvas, blocks.flatMap((block, i) => {
    const y = 16 + i * (high + 3);
    write(context, block.about.short, LEFT - 7, y + high / 2 + 4, i === now ? theme.accent : theme.soft, "right", i === now ? "700" : "400");
    return Array.from({ length: block.about.heads }, (_, h) => {
      const values = scene.ofHead(model, i, h), range = rangeOf([values]) ?? [0, 1];
      const box = { ...fitted(LEFT + h * (side + 3), y, side, aspect), y };
      paintCells(context, box, block.about, image, coloursOf(values, MAGMA, 0, range[1]), theme.none);
      if (i === now) outline(context, box, h === head && view === "attention" ? 2.5 : 0.75, theme.accent);
      return { box, model, layer: i, image: h };
    });
  }));
  canvas.setAttribute("aria-label", `${scene.models[model].about.name}: attention of ${blocks.length} blocks by at most ${most} heads, a map each`);
}

/** How far the chosen patch's likeness reaches, by model and layer.
 * @param {Scene} scene */
function reaches(scene) {
  const { chosen, several } = scene, { image } = chosen;
  return scene.models.map((model) => model.sites.map((site) => {
    const own = chosenCells(site.about, chosen, several), query = queryOf(site.tokens, site.cells, image, own);
    const none = { mean: NaN, neighbours: NaN, area: NaN };
    return { site, own, ...(query ? reachOf(cosines(site.tokens, site.cells, query, image), own, site.about.grid) : none) };
  }));
}

/** Curves over depth, and the same numbers as a table.
 * @param {Scene} scene
 * @param {HTMLElement} place
 * @param {HTMLElement} table
 * @param {boolean} withTable */
export function drawNumbers(scene, place, table, withTable) {
  const found = reaches(scene), { image } = scene.state;
  place.replaceChildren();
  /** @param {"mean" | "neighbours"} what */
  const lines = (what) => found.map((sites, k) => ({
    name: scene.models[k].about.name, colour: k, baseline: false,
    points: sites.filter((one) => !Number.isNaN(one[what])).map((one) => /** @type {Point} */ (
      [one.site.about.rel_depth, one[what], null, null, null, one.site.about.words, ""])),
  })).filter((line) => line.points.length);
  for (const [what, title] of /** @type {["neighbours" | "mean", string][]} */ ([["neighbours", "cosine with its neighbours"], ["mean", "cosine with all other patches"]])) {
    const shown = lines(what);
    if (!shown.length) continue;
    const figure = html("figure", "", place, "chart");
    html("span", title, html("figcaption", "", figure));
    curves(figure, { lines: shown, title, metric: "cosine", heads: false }, Math.max(260, Math.min(460, place.clientWidth / 2 - 40)));
  }
  if (!place.firstChild) html("p", "The chosen patch has no numbers: it lies outside of what the models saw, or its features have no length.", place, "missing");
  if (!withTable) return;
  const heads = ["model", "layer", "mean cosine", "neighbours", "area", "norm", "norm, median", "classifier", "share"];
  table.replaceChildren();
  const top = html("tr", "", html("thead", "", table));
  for (const name of heads) html("th", name, top).scope = "col";
  const body = html("tbody", "", table);
  found.forEach((sites, k) => sites.forEach(({ site, own, mean, neighbours, area }) => {
    const row = html("tr", "", body, site === scene.site(k) ? "now" : ""), cell = own[own.length >> 1];
    const norm = cell === undefined ? NaN : site.tokens.norms[image * site.cells + cell];
    const all = site.tokens.norms.subarray(image * site.cells, (image + 1) * site.cells);
    const t = image * (1 + site.cells) + 1 + (cell ?? 0), said = site.classes && site.shares && cell !== undefined;
    const text = (/** @type {number} */ v) => Number.isNaN(v) ? "" : number(v);
    for (const value of [
      scene.models[k].about.name, site.about.words, text(mean), text(neighbours), text(area), text(norm), text(medianOf(all)),
      said && site.classes ? scene.className(k, site.classes[t]) : "", said && site.shares ? `${Math.round(site.shares[t] / 2.55)} %` : "",
    ]) html("td", value, row);
  }));
}

/** What packing costs each layer.
 * @param {Scene} scene
 * @param {HTMLElement} table */
export function drawErrors(scene, table) {
  const top = html("tr", "", html("thead", "", table));
  for (const name of ["model", "layer", "channels", "numbers", "cosine's error: 99 of 100", "largest", "pairs"]) html("th", name, top).scope = "col";
  const body = html("tbody", "", table);
  for (const model of scene.models) for (const { about } of model.sites) {
    const row = html("tr", "", body), { error } = about;
    const cells = [model.about.name, about.name, about.channels, about.dims, number(error.p99), number(error.largest), error.n_pairs.toLocaleString("en")];
    for (const cell of cells) html("td", String(cell), row);
  }
}

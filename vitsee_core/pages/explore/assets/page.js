// The page: what is drawn when, and what a click chooses.

import { cellAt, middleOf } from "./arithmetic.js";
import { density } from "./drawing.js";
import { drawElsewhere, drawFilm, drawHeads, drawNumbers } from "./panels.js";
import { drawLegend, drawPhoto, drawStage, drawStrip, hovering, patchOf, pointed, sayPlace } from "./stage.js";
import { nearestDepth, readState, writeState } from "./state.js";
import { byId, html, number } from "../../html/assets/elements.js";

/** @typedef {import("./scene.js").Scene} Scene
 * @typedef {import("./state.js").State} State
 * @typedef {import("./stage.js").Theme} Theme */

const BELOW = ["others", "heads", "depths"], NEAR = "200px";
export const VIEWS = ["cosine", "attention", "pca", "norms", "lens"];

/** Colours of the page, as they are now.
 * @returns {Theme} */
function themeNow() {
  const style = getComputedStyle(document.documentElement);
  const of = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return { none: of("none"), soft: of("soft"), ink: of("ink"), accent: of("accent"), card: of("card") };
}

/** @param {HTMLElement} element
 * @returns {number} */
const roomOf = (element) => element.clientWidth;

export class Page {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    this.theme = themeNow();
    this.stage = byId("stage");
    /** @type {Map<string, string>} what was drawn last, by panel */
    this.drawn = new Map();
    /** @type {Set<string>} panels that are on the screen, or near it */
    this.near = new Set();
    this.pending = 0;
    this.asked = 0;
    this.photo = this.makeStage();
    density.now = Math.max(1, window.devicePixelRatio || 1);
    this.watch();
  }

  // ---------------------------------------------------------------- state

  /** @param {Partial<State>} change
   * @param {boolean} [keep] the address */
  choose(change, keep = false) {
    this.asked = performance.now();
    this.scene.state = this.scene.withAttention({ ...this.scene.state, ...change });
    if (!keep) history.replaceState(null, "", writeState(this.scene.state));
    if (!this.pending) this.pending = requestAnimationFrame(() => this.draw());
  }

  /** The image that is the frame of the chosen clip at a place in time.
   * @param {number} time
   * @returns {number} */
  atTime(time) {
    const { image } = this.scene.state, n = this.scene.about.times?.length ?? 1;
    return image - image % n + time;
  }

  /** What the address asks for. */
  open() {
    const { scene } = this, heads = Math.max(1, ...scene.models.flatMap((model) => model.blocks.map((block) => block.about.heads)));
    const limits = { images: scene.about.images.length, grid: scene.reference.grid, layers: scene.depths.length, views: VIEWS, heads, steps: scene.about.steps?.numbers.length ?? 0 };
    this.choose(readState(location.hash, scene.state, limits), true);
  }

  /** Draw everything again, in the window's colours and width.
   * @param {number} [scale] pixels of a CSS pixel, for a picture, at once */
  anew(scale) {
    this.drawn.clear();
    this.theme = themeNow();
    density.now = scale ?? Math.max(1, window.devicePixelRatio || 1);
    if (scale) this.draw(); else this.choose({}, true);
  }

  // ---------------------------------------------------------------- drawing

  draw() {
    this.pending = 0;
    const { scene } = this, { state } = scene, { image, layer, view, scale, head, step } = state;
    const at = [image, state.patch, state.box].join();
    this.say();
    this.fresh("film", [image], () => drawFilm(scene, byId("film"), this.theme));
    this.fresh("layers", [view, head, step], () => this.makeMaps());
    this.fresh("photo", [at], () => drawPhoto(scene, this.photo, this.theme, roomOf(/** @type {HTMLElement} */ (this.stage.firstElementChild))));
    const shown = ["cosine", "attention"].includes(view) ? at : `${image},${at}`;
    for (const canvas of this.stage.querySelectorAll("canvas[data-model]")) this.drawMap(/** @type {HTMLCanvasElement} */ (canvas));
    this.fresh("legend", [shown, layer, view, scale, head], () => drawLegend(scene, byId("legend")));
    this.fresh("strips", [shown, layer, view, scale, head], () => {
      for (const canvas of byId("strips").querySelectorAll("canvas")) drawStrip(scene, canvas, Number(canvas.dataset.model), this.theme, roomOf(byId("strips")));
    });
    this.seen("others", [at, layer, step], () => this.drawOthers());
    this.seen("heads", [image, layer, view, head, step], () => this.drawMatrices());
    const open = /** @type {HTMLDetailsElement} */ (byId("numbers")).open;
    this.seen("depths", [at, open ? layer : "", open], () => drawNumbers(scene, byId("curves"), /** @type {HTMLElement} */ (byId("numbers").querySelector("table")), open));
    this.showControls();
    performance.measure("explore:answer", { start: this.asked, end: performance.now() });
  }

  /** Draw a panel where what it shows is not drawn yet.
   * @param {string} panel
   * @param {unknown[]} shown
   * @param {() => void} draw */
  fresh(panel, shown, draw) {
    const key = shown.join(";");
    if (this.drawn.get(panel) === key) return;
    draw();
    this.drawn.set(panel, key);
  }

  /** The same of a panel that is drawn only where it is on the screen, or near it.
   * @param {string} panel
   * @param {unknown[]} shown
   * @param {() => void} draw */
  seen(panel, shown, draw) {
    if (this.near.has(panel)) this.fresh(panel, shown, draw);
  }

  /** Draw panels once they come near. */
  watch() {
    const watching = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) isIntersecting ? this.near.add(target.id) : this.near.delete(target.id);
      this.choose({}, true);
    }, { rootMargin: NEAR });
    for (const panel of BELOW) watching.observe(byId(panel));
  }

  /** Draw them all, for a printer. */
  whole() {
    for (const panel of BELOW) this.near.add(panel);
    this.draw();
  }

  say() {
    const { scene } = this, { image, box } = scene.state, place = byId("said"), [row, col] = patchOf(scene);
    const [rows, cols] = scene.reference.grid, name = scene.label(image);
    place.replaceChildren();
    html("b", "", place).append(html("bdi", scene.about.images[image].id));
    place.append(name ? `, ${name}; ` : "; ");
    place.append(box ? `mean of ${(box[2] - box[0] + 1) * (box[3] - box[1] + 1)} patches, rows ${box[0]} to ${box[2]}, columns ${box[1]} to ${box[3]}` : `patch ${row},${col}`);
    place.append(` of ${rows} × ${cols}${scene.models.length > 1 && scene.state.step < 0 ? ` of ${scene.models[0].about.name}` : ""}`);
  }

  /** @param {HTMLCanvasElement} canvas */
  drawMap(canvas) {
    const { scene } = this, model = Number(canvas.dataset.model), layer = scene.current(model);
    drawStage(scene, canvas, model, this.theme, roomOf(/** @type {HTMLElement} */ (canvas.parentElement)));
    const map = scene.map(model, layer), value = canvas.parentElement?.querySelector(".value");
    const words = scene.layers(model)[layer].words, cell = map.own[map.own.length >> 1];
    if (!value) return;
    const { view, head } = scene.state, own = map.values && cell !== undefined ? map.values[cell] : NaN;
    const sum = map.values?.reduce((a, v) => a + (Number.isNaN(v) ? 0 : v), 0) ?? 0;
    const more = view === "attention" ? `${head >= 0 ? `head ${head}, ` : ""}${Math.round(100 * sum)} % on patches`
      : view === "norms" && !Number.isNaN(own) ? `this patch: ${number(+own.toPrecision(3))}` : "";
    value.textContent = [words, more].filter(Boolean).join(" · ");
    canvas.setAttribute("aria-label", `${scene.models[model].about.name}, ${value.textContent}: a map of ${view}`);
  }

  drawOthers() {
    const place = byId("elsewhere"), { scene } = this;
    if (scene.about.images.length < 2) {
      if (!place.firstChild) html("p", "The page has one image: there is none to compare with.", place, "missing");
      return;
    }
    scene.models.forEach((model, k) => {
      const figure = place.children[k] ?? this.makeRow(place, model.about.name, k, (found) => {
        const site = scene.site(k), cell = cellAt(site.about, found.target.image, found.y, found.x);
        if (cell >= 0) this.chooseAt(found.target.image, middleOf(site.about, found.target.image, cell));
      });
      if (!this.keepShown(figure, k)) return;
      const canvas = /** @type {HTMLCanvasElement} */ (figure.querySelector("canvas"));
      drawElsewhere(scene, canvas, /** @type {HTMLElement} */ (figure.querySelector(".value")), k, this.theme, roomOf(place));
    });
  }

  drawMatrices() {
    const { scene } = this, place = byId("matrices");
    if (!place.firstChild) scene.models.forEach((model, k) => {
      const { attention } = model.about;
      if (typeof attention === "string") {
        const figure = html("figure", "", place);
        html("b", model.about.name, html("figcaption", "", figure));
        html("p", attention, figure, "missing");
      } else {
        const figure = this.makeRow(place, model.about.name, k, ({ target }) => {
          const depth = model.blocks[target.layer].about.rel_depth;
          this.choose({ view: "attention", head: target.image, layer: nearestDepth(scene.depths, depth) });
        });
        const said = figure.querySelector(".value");
        if (said) said.textContent = `from the ${attention.from}; blocks downwards, heads across`;
      }
    });
    [...place.children].forEach((figure, k) => this.keepShown(figure, k));
    for (const canvas of place.querySelectorAll("canvas")) if (scene.shows(Number(canvas.dataset.model))) {
      drawHeads(scene, canvas, Number(canvas.dataset.model), this.theme, roomOf(/** @type {HTMLElement} */ (canvas.parentElement)));
    }
  }

  /** Hide a model's figure that is not of the chosen step; whether it is shown.
   * @param {Element} figure
   * @param {number} model
   * @returns {boolean} */
  keepShown(figure, model) {
    const shown = this.scene.shows(model);
    /** @type {HTMLElement} */ (figure).style.display = shown ? "" : "none";
    return shown;
  }

  showControls() {
    const { scene } = this, { state } = scene;
    for (const input of /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("#controls input[type=radio]"))) {
      input.checked = input.value === (input.name === "view" ? state.view : state.scale);
      if (input.name === "scale") input.disabled = state.view === "pca" || state.view === "lens";
    }
    const slider = /** @type {HTMLInputElement} */ (byId("layer")), depth = scene.depths[state.layer];
    slider.max = String(scene.depths.length - 1);
    slider.value = String(state.layer);
    slider.disabled = scene.depths.length < 2;
    const { steps } = scene.about;
    if (steps) {
      const input = /** @type {HTMLInputElement} */ (byId("step")), said = `${steps.unit} ${steps.numbers[state.step].toLocaleString("en")}`;
      input.max = String(steps.numbers.length - 1);
      input.value = String(state.step);
      input.setAttribute("aria-valuetext", byId("at-step").textContent = said);
    }
    const { times } = scene.about;
    if (times) {
      const input = /** @type {HTMLInputElement} */ (byId("time")), now = state.image % times.length;
      input.max = String(times.length - 1);
      input.value = String(now);
      input.setAttribute("aria-valuetext", byId("at-time").textContent = `frame ${times[now]}`);
    }
    const words = scene.site(0).about.words;
    byId("depth").textContent = `${words} · depth ${number(+depth.toFixed(2))}`;
    slider.setAttribute("aria-valuetext", `${words}, relative depth ${depth.toFixed(2)}`);
    for (const how of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".how"))) how.hidden = how.dataset.view !== state.view;
  }

  // ---------------------------------------------------------------- elements

  /** @returns {HTMLCanvasElement} of the photograph */
  makeStage() {
    const figure = html("figure", "", this.stage), caption = html("figcaption", "", figure);
    html("b", "Photograph", caption);
    html("span", "click a patch, or drag a box", caption);
    const canvas = html("canvas", "", figure);
    canvas.id = "photo";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    return canvas;
  }

  /** A row of maps with a caption.
   * @param {HTMLElement} place
   * @param {string} name
   * @param {number} model
   * @param {(found: {target: import("./stage.js").Target, y: number, x: number}) => void} clicked */
  makeRow(place, name, model, clicked) {
    const figure = html("figure", "", place, "row"), caption = html("figcaption", "", figure);
    html("bdi", name, html("b", "", caption));
    html("span", "", caption, "value");
    const canvas = html("canvas", "", figure);
    canvas.dataset.model = String(model);
    canvas.setAttribute("role", "img");
    canvas.addEventListener("click", (e) => { const found = pointed(canvas, e); if (found) clicked(found); });
    return figure;
  }

  /** The maps and strips of the models that the view has something of. */
  makeMaps() {
    const { scene } = this, strips = byId("strips");
    strips.replaceChildren();
    while (this.stage.children.length > 1) this.stage.lastElementChild?.remove();
    this.drawn.delete("strips");
    scene.models.forEach((model, k) => {
      if (!scene.shows(k)) return;
      const name = model.about.name;
      if (!scene.layers(k).length) {
        html("p", `${name}: ${this.whyNot(k)}`, strips, "missing");
        return;
      }
      const map = this.makeRow(this.stage, name, k, (found) => this.chooseOn(found));
      map.className = "";
      const detail = [model.about.model, model.about.weights].filter((x) => x && x !== name).join(", ");
      const strip = this.makeRow(strips, name, k, (found) => this.chooseOn(found, true));
      const said = strip.querySelector(".value");
      if (said) said.textContent = detail;
      for (const figure of [map, strip]) hovering(/** @type {HTMLCanvasElement} */ (figure.querySelector("canvas")), (found) => sayPlace(scene, found));
    });
    const n = this.stage.children.length, most = Math.max(1, Math.floor((roomOf(this.stage) + 16) / 240));
    this.stage.style.gridTemplateColumns = window.innerWidth > 700 ? `repeat(${Math.min(n, most)}, minmax(0, 360px))` : "";
  }

  /** Why a view has nothing of a model.
   * @param {number} model
   * @returns {string} */
  whyNot(model) {
    const { about, blocks } = this.scene.models[model], { view, head } = this.scene.state;
    if (view === "lens") return about.lens ?? "its classifier reads none of these layers";
    if (view === "pca") return "its layers have too few patches or channels for three components";
    if (typeof about.attention === "string") return about.attention;
    if (head >= 0) return `it has no head ${head}`;
    return blocks.length ? "its store keeps the heads' attention (below), not that of patches: extract with --attention full, or explore with --recompute" : "no attention";
  }

  // ---------------------------------------------------------------- choosing

  /** Choose the patch at a place of an image.
   * @param {number} image
   * @param {number[]} place y, x */
  chooseAt(image, [y, x]) {
    const patch = cellAt(this.scene.reference, image, y, x);
    this.choose(patch >= 0 ? { image, patch, box: null } : { image });
  }

  /** Choose what a map was clicked at.
   * @param {{target: import("./stage.js").Target, y: number, x: number}} found
   * @param {boolean} [withLayer] */
  chooseOn({ target, y, x }, withLayer = false) {
    const { scene } = this, layer = scene.layers(target.model)[target.layer], { image } = scene.state;
    if (withLayer) this.choose({ layer: nearestDepth(scene.depths, layer.relDepth) });
    const cell = cellAt(layer.grid, image, y, x);
    if (cell >= 0) this.chooseAt(image, [y, x]);
  }
}

// What the page follows: pointer, keys, controls, the window, and what is taken along.

import { cellAt } from "./arithmetic.js";
import { density } from "./drawing.js";
import { makeFilm } from "./panels.js";
import { pictureOf } from "./snapshot.js";
import { patchOf } from "./stage.js";
import { writeState } from "./state.js";
import { byId, html } from "../../html/assets/elements.js";
import { hideTip } from "../../html/assets/pointing.js";

/** @typedef {import("./page.js").Page} Page */

const MOVES = /** @type {Record<string, number[]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] });
const LATER = 1500; // milliseconds that a button says what it did

/** Say why something cannot be shown.
 * @param {string} why */
export function fail(why) {
  const place = byId("trouble");
  place.textContent = why;
  place.hidden = false;
}

/** Answer to everything that a reader does.
 * @param {Page} page */
export function follow(page) {
  makeFilm(page.scene, byId("film"), (image) => page.choose({ image, box: null }));
  followPointer(page);
  page.photo.addEventListener("keydown", (e) => { if (followKey(page, e)) e.preventDefault(); });
  followControls(page);
  followWindow(page);
  byId("copy").addEventListener("click", () => copyLink(page));
  byId("save").addEventListener("click", () => savePicture(page));
}

/** A patch that is clicked, a box that is dragged.
 * @param {Page} page */
function followPointer(page) {
  const { scene, photo } = page, boxing = /** @type {HTMLInputElement} */ (byId("boxing"));
  const cellOf = (/** @type {PointerEvent} */ e, clamp = false) => {
    const box = photo.getBoundingClientRect();
    const inside = (/** @type {number} */ v) => clamp ? Math.min(Math.max(v, 0.001), 0.999) : v;
    return cellAt(scene.reference, scene.state.image, inside((e.clientY - box.top) / box.height), inside((e.clientX - box.left) / box.width));
  };
  const drags = (/** @type {PointerEvent} */ e) => e.pointerType === "mouse" || boxing.checked;
  let from = -1;
  photo.addEventListener("pointerdown", (e) => {
    from = e.button ? -1 : cellOf(e);
    if (from < 0) return;
    if (drags(e)) photo.setPointerCapture(e.pointerId);
    page.choose({ patch: from, box: null });
  });
  photo.addEventListener("pointermove", (e) => {
    const to = from >= 0 && e.buttons & 1 && drags(e) ? cellOf(e, true) : -1;
    if (to >= 0) page.choose({ box: to === from ? null : spanned(scene.reference.grid[1], from, to) });
  });
  for (const end of ["pointerup", "pointercancel"]) photo.addEventListener(end, () => { from = -1; });
  boxing.addEventListener("change", () => {
    photo.classList.toggle("boxing", boxing.checked);
    if (!boxing.checked) page.choose({ box: null });
  });
}

/** First and last row and column of two cells.
 * @param {number} cols
 * @param {number} a
 * @param {number} b
 * @returns {number[]} */
function spanned(cols, a, b) {
  const rows = [Math.floor(a / cols), Math.floor(b / cols)], at = [a % cols, b % cols];
  return [Math.min(...rows), Math.min(...at), Math.max(...rows), Math.max(...at)];
}

/** Whether a key on the photograph means something.
 * @param {Page} page
 * @param {KeyboardEvent} e
 * @returns {boolean} */
function followKey(page, e) {
  const { scene } = page, { state, depths } = scene, [rows, cols] = scene.reference.grid, move = MOVES[e.key];
  const within = (/** @type {number} */ v, /** @type {number} */ low, /** @type {number} */ high) => Math.min(Math.max(v, low), high);
  if (move && e.shiftKey) {
    const [top, left, bottom, right] = state.box ?? [...patchOf(scene), ...patchOf(scene)];
    page.choose({ box: [top, left, within(bottom + move[0], top, rows - 1), within(right + move[1], left, cols - 1)] });
  } else if (move) {
    const [row, col] = patchOf(scene);
    page.choose({ patch: within(row + move[0], 0, rows - 1) * cols + within(col + move[1], 0, cols - 1), box: null });
  } else if (e.key === "PageUp" || e.key === "PageDown") {
    page.choose({ layer: within(state.layer + (e.key === "PageUp" ? -1 : 1), 0, depths.length - 1) });
  } else if (e.key === "Escape") {
    hideTip();
    page.choose({ box: null });
  } else return false;
  return true;
}

/** View, layer, step, colours.
 * @param {Page} page */
function followControls(page) {
  const controls = byId("controls");
  controls.addEventListener("submit", (e) => e.preventDefault());
  controls.addEventListener("input", (e) => {
    const input = /** @type {HTMLInputElement} */ (e.target);
    if (input.name === "view") page.choose({ view: input.value, head: -1 });
    else if (input.name === "scale") page.choose({ scale: input.value });
    else if (input.id === "layer") page.choose({ layer: Number(input.value) });
    else if (input.id === "step") page.choose({ step: Number(input.value) });
    else if (input.id === "time") page.choose({ image: page.atTime(Number(input.value)) });
  });
  byId("numbers").addEventListener("toggle", () => page.choose({}, true));
}

/** The address, light and dark, the width.
 * @param {Page} page */
function followWindow(page) {
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true; else page.open();
  });
  window.addEventListener("beforeprint", () => page.whole());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.anew());
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; page.anew(); } });
}

/** @param {Page} page */
async function copyLink(page) {
  history.replaceState(null, "", writeState(page.scene.state));
  const button = byId("copy");
  try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; }
  catch { button.textContent = "It is in the address bar"; }
  setTimeout(() => { button.textContent = "Copy link"; }, LATER);
}

/** @param {Page} page */
function savePicture(page) {
  const { about, state } = page.scene;
  page.anew(2);
  const picture = pictureOf(byId("view"), about.title, density.now);
  page.anew();
  picture.toBlob((blob) => {
    if (!blob) return fail("This browser makes no PNG of a canvas this large.");
    const link = html("a", "");
    link.href = URL.createObjectURL(blob);
    link.download = `explore-${state.view}-${state.image}-${state.patch}-${state.layer}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), LATER);
  }, "image/png");
}

// Reads the page's numbers and begins.

import { fail, follow } from "./following.js";
import { Page, VIEWS } from "./page.js";
import { inflate, readBlocks, readSites } from "./packed.js";
import { drawErrors } from "./panels.js";
import { Scene } from "./scene.js";
import { byId, html } from "../../html/assets/elements.js";

/** @typedef {import("./packed.js").About} About */

const FIRST_DEPTH = 0.75; // of the layers

/** A photograph, decoded; an empty one where there is none.
 * @param {string} address
 * @returns {Promise<HTMLImageElement>} */
async function photoOf(address) {
  const image = new Image();
  if (!address) return image;
  image.src = address;
  await image.decode().catch(() => undefined);
  return image;
}

/** @param {string} kind */
async function blobOf(kind) {
  const place = document.getElementById(`blob-${kind}`), text = place?.textContent;
  if (!place || !text) return null;
  place.remove();
  return inflate(text);
}

/** After what was asked for is on the screen. */
const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))));

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    return fail("This browser cannot unpack the page's numbers: it lacks DecompressionStream, which Chrome, Edge, Firefox and Safari have since 2023.");
  }
  /** @type {About} */
  const about = JSON.parse(byId("data").textContent ?? "");
  const n = about.images.length, blobs = about.models.map((_, k) => (/** @type {string} */ kind) => blobOf(`${kind}${k}`));
  /** @type {import("./packed.js").Model[]} */
  const models = await Promise.all(about.models.map(async (model, k) => ({ about: model, sites: await readSites(model, n, blobs[k]), blocks: [] })));
  const photos = await Promise.all(about.images.map((image) => photoOf(image.picture)));
  const state = { image: 0, patch: 0, box: null, layer: 0, view: VIEWS[0], scale: "shared", head: -1, step: about.steps ? about.steps.numbers.length - 1 : -1 };
  const scene = new Scene(about, models, photos, state), [rows, cols] = scene.reference.grid;
  state.patch = (rows >> 1) * cols + (cols >> 1);
  state.layer = Math.round((scene.depths.length - 1) * FIRST_DEPTH);
  byId("main").hidden = false;
  for (const model of about.models) for (const line of model.remarks) html("p", `${model.name}: ${line}`, byId("main"), "caution");
  drawErrors(scene, byId("errors"));
  const attention = async () => {
    for (const [k, model] of models.entries()) model.blocks = await readBlocks(model.about, n, blobs[k]);
    scene.known.clear();
  };
  const first = location.hash.includes("view=attention");
  if (first) await attention();
  const page = new Page(scene);
  follow(page);
  page.open();
  await painted();
  performance.measure("explore:ready", { start: 0, end: performance.now() });
  if (!first) await attention();
  page.anew();
  await painted();
  performance.measure("explore:whole", { start: 0, end: performance.now() });
  return undefined;
}

begin().catch((error) => fail(`The page could not be drawn: ${error instanceof Error ? error.message : error}`));

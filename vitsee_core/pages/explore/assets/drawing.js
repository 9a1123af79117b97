// Maps, photographs and outlines on canvases.

import { edgesOf } from "./arithmetic.js";
import { colourAt } from "../../html/assets/palettes.js";

/** A rectangle in CSS pixels: where an image's frame is drawn.
 * @typedef {{x: number, y: number, w: number, h: number}} Box
 * @typedef {import("./arithmetic.js").Grid} Grid
 * @typedef {import("../../html/assets/palettes.js").Palette} Palette */

const LEVELS = 255;
/** @type {Map<Palette, Uint8ClampedArray>} */
const tables = new Map();
const scratch = document.createElement("canvas");

export const CHOSEN = "#ff2f64"; // the outline of chosen patches

/** How many pixels a CSS pixel has in what is drawn. */
export const density = { now: 1 };

/** A canvas of this size in CSS pixels, empty.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {CanvasRenderingContext2D} */
export function surface(canvas, width, height) {
  const scale = density.now, w = Math.round(width * scale), h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser draws on no canvas");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A frame of this height over width, as large as fits a square, in its middle.
 * @param {number} x
 * @param {number} y
 * @param {number} side
 * @param {number} aspect
 * @returns {Box} */
export function fitted(x, y, side, aspect) {
  const w = aspect > 1 ? side / aspect : side, h = w * aspect;
  return { x: x + (side - w) / 2, y: y + (side - h) / 2, w, h };
}

/** Red, green, blue, alpha of numbers; nothing where there is none.
 * @param {Float32Array} values
 * @param {Palette} palette
 * @param {number} low
 * @param {number} high
 * @param {number[]} [alpha] of the lowest and the highest
 * @returns {Uint8ClampedArray} */
export function coloursOf(values, palette, low, high, alpha = [1, 1]) {
  let table = tables.get(palette);
  if (!table) {
    table = new Uint8ClampedArray(4 * (LEVELS + 1));
    for (let i = 0; i <= LEVELS; i++) table.set(colourAt(palette, i / LEVELS), 4 * i);
    tables.set(palette, table);
  }
  const found = new Uint8ClampedArray(4 * values.length), span = high > low ? LEVELS / (high - low) : 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i])) continue;
    const level = Math.min(LEVELS, Math.max(0, Math.round((values[i] - low) * span)));
    for (let k = 0; k < 3; k++) found[4 * i + k] = table[4 * level + k];
    found[4 * i + 3] = 255 * (alpha[0] + (alpha[1] - alpha[0]) * level / LEVELS);
  }
  return found;
}

/** Where a part of a frame (top, left, bottom, right) is drawn.
 * @param {Box} box
 * @param {number[]} edges
 * @returns {number[]} x, y, width, height */
const placed = (box, [top, left, bottom, right]) =>
  [box.x + left * box.w, box.y + top * box.h, (right - left) * box.w, (bottom - top) * box.h];

/** @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {() => void} draw */
function clipped(context, box, draw) {
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.w, box.h);
  context.clip();
  draw();
  context.restore();
}

/** Cells in their colours, `none` below those without.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Grid} grid
 * @param {number} image
 * @param {Uint8ClampedArray} colours
 * @param {string} none "" leaves what is there */
export function paintCells(context, box, grid, image, colours, none) {
  const [rows, cols] = grid.grid;
  if (scratch.width !== cols || scratch.height !== rows) { scratch.width = cols; scratch.height = rows; }
  const inner = scratch.getContext("2d");
  if (!inner) return;
  const pixels = inner.createImageData(cols, rows);
  pixels.data.set(colours);
  inner.putImageData(pixels, 0, 0);
  clipped(context, box, () => {
    if (none) { context.fillStyle = none; context.fillRect(box.x, box.y, box.w, box.h); }
    context.imageSmoothingEnabled = false;
    const [x, y, w, h] = placed(box, edgesOf(grid, image));
    context.drawImage(scratch, x, y, w, h);
  });
}

/** A photograph.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {HTMLImageElement} photo
 * @param {number[]} edges its own on the frame
 * @param {string} none
 * @param {boolean} [grey] */
export function paintPhoto(context, box, photo, edges, none, grey = false) {
  clipped(context, box, () => {
    context.fillStyle = none;
    context.fillRect(box.x, box.y, box.w, box.h);
    if (!photo.naturalWidth) return;
    const [x, y, w, h] = placed(box, edges);
    context.imageSmoothingEnabled = w < 4 * photo.naturalWidth;
    context.imageSmoothingQuality = "high";
    if (grey) context.filter = "grayscale(1)";
    context.drawImage(photo, x, y, w, h);
  });
}

/** The rectangle around cells.
 * @param {Box} box
 * @param {Grid} grid
 * @param {number} image
 * @param {number[]} cells
 * @returns {Box} */
export function aroundCells(box, grid, image, cells) {
  const [rows, cols] = grid.grid, [x, y, w, h] = placed(box, edgesOf(grid, image));
  const own = cells.map((cell) => [Math.floor(cell / cols), cell % cols]);
  const top = Math.min(...own.map(([r]) => r)), left = Math.min(...own.map(([, c]) => c));
  const bottom = Math.max(...own.map(([r]) => r)) + 1, right = Math.max(...own.map(([, c]) => c)) + 1;
  return { x: x + left / cols * w, y: y + top / rows * h, w: (right - left) / cols * w, h: (bottom - top) / rows * h };
}

/** A line around a rectangle that shows on light and dark.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} at
 * @param {number} width
 * @param {string} [colour]
 * @param {number[]} [dash] */
export function outline(context, at, width, colour = "#fff", dash = []) {
  context.save();
  context.lineJoin = "round";
  context.strokeStyle = "rgba(0, 0, 0, .6)";
  context.lineWidth = width + 1.5;
  context.strokeRect(at.x, at.y, at.w, at.h);
  context.setLineDash(dash);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(at.x, at.y, at.w, at.h);
  context.restore();
}

/** A short text.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} colour
 * @param {CanvasTextAlign} [align]
 * @param {string} [weight]
 * @param {number} [room] pixels; a longer text ends in an ellipsis */
export function write(context, text, x, y, colour, align = "center", weight = "400", room = Infinity) {
  context.font = `${weight} 11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  context.textAlign = align;
  context.textBaseline = "alphabetic";
  context.fillStyle = colour;
  let shown = text;
  for (let n = text.length - 1; n > 0 && context.measureText(shown).width > room; n--) shown = `${text.slice(0, n)}…`;
  context.fillText(shown, x, y);
}

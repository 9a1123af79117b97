// Colours of numbers from 0 to 1.

/** @param {string} text of hexadecimal colours */
const stops = (text) => text.split(" ").map((h) => [0, 2, 4].map((i) => parseInt(h.slice(i, i + 2), 16)));

/** @typedef {number[][]} Palette */

/** @type {Palette} */
export const MAGMA = stops("000004 140e36 3b0f70 641a80 8c2981 b73779 de4968 f7705c fe9f6d fecf92 fcfdbf");
/** @type {Palette} */
export const VIRIDIS = stops("440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725");

/** Red, green and blue.
 * @param {Palette} palette
 * @param {number} t
 * @returns {number[]} */
export function colourAt(palette, t) {
  const x = Math.min(Math.max(t, 0), 1) * (palette.length - 1), i = Math.min(Math.floor(x), palette.length - 2);
  return palette[i].map((c, k) => Math.round(c + (palette[i + 1][k] - c) * (x - i)));
}

/** @param {number[]} colour */
export const css = (colour) => "rgb(" + colour.join(",") + ")";

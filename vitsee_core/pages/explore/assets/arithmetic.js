// What the page computes: places on images, cosines of packed tokens, what they say. No document.

/** A grid of cells and where it lies: edges (top, left, bottom, right) as shares of an image's
 * frame, of each image or one for all.
 * @typedef {{grid: number[], edges: number[][]}} Grid */

/** The tokens of a site over all images, as `tokens.py` packs them; norms: NaN where none counts.
 * @typedef {{along: Int16Array, step: number, codes: Int8Array, dims: number, norms: Float32Array}} Tokens */

/** A chosen patch, or the mean of several, of one image: its product with a token's numbers, less
 * `length`, is the cosine. rests: by cell, what these numbers leave out of a token's own square.
 * @typedef {{image: number, cells: number[], along: number, vector: Float32Array, length: number, rests: Map<number, number>}} Query */

const ALONG = 32767, ROW = 65535 * 255;

/** @param {Grid} at
 * @param {number} image */
export const edgesOf = (at, image) => at.edges[at.edges.length > 1 ? image : 0];

/** @param {Grid} at */
export const nCells = (at) => at.grid[0] * at.grid[1];

/** The cell at a place of the frame; -1 for none.
 * @param {Grid} at
 * @param {number} image
 * @param {number} y
 * @param {number} x
 * @returns {number} */
export function cellAt(at, image, y, x) {
  const [top, left, bottom, right] = edgesOf(at, image), [rows, cols] = at.grid;
  const row = Math.floor((y - top) / (bottom - top) * rows + 1e-6);
  const col = Math.floor((x - left) / (right - left) * cols + 1e-6);
  return row < 0 || col < 0 || row >= rows || col >= cols ? -1 : row * cols + col;
}

/** The middle (y, x) of a cell on the frame.
 * @param {Grid} at
 * @param {number} image
 * @param {number} cell
 * @returns {number[]} */
export function middleOf(at, image, cell) {
  const [top, left, bottom, right] = edgesOf(at, image), [rows, cols] = at.grid;
  return [top + (Math.floor(cell / cols) + 0.5) / rows * (bottom - top),
          left + (cell % cols + 0.5) / cols * (right - left)];
}

/** The cells whose middle is in a box (y0, x0, y1, x1) of the frame; of a box without any, the cell
 * at its middle.
 * @param {Grid} at
 * @param {number} image
 * @param {number[]} box
 * @returns {number[]} */
export function cellsIn(at, image, box) {
  const found = [];
  for (let cell = 0; cell < nCells(at); cell++) {
    const [y, x] = middleOf(at, image, cell);
    if (y > box[0] && y < box[2] && x > box[1] && x < box[3]) found.push(cell);
  }
  const middle = cellAt(at, image, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2);
  return found.length || middle < 0 ? found : [middle];
}

/** Float32 of their upper halves.
 * @param {Uint16Array} halves
 * @returns {Float32Array} */
export function bfloat16(halves) {
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}

/** The mean of an image's tokens in these cells; null where none of them has a direction.
 * @param {Tokens} tokens
 * @param {number} perImage cells of an image
 * @param {number} image
 * @param {number[]} cells
 * @returns {Query | null} */
export function queryOf(tokens, perImage, image, cells) {
  const n = tokens.along.length, vector = new Float32Array(tokens.dims), rests = new Map();
  let along = 0, square = 0;
  const counted = cells.filter((cell) => tokens.norms[image * perImage + cell] > 0);
  for (const cell of counted) {
    const t = image * perImage + cell, norm = tokens.norms[t];
    const first = tokens.along[t] / ALONG;
    let own = first * first;
    along += norm * first;
    for (let j = 0; j < tokens.dims; j++) {
      const c = tokens.codes[j * n + t] * tokens.step;
      vector[j] += norm * c;
      own += c * c;
    }
    rests.set(cell, norm * (1 - own));
    square += norm * norm * (1 - own);
  }
  square += along * along;
  for (const v of vector) square += v * v;
  if (!counted.length || !(square > 0)) return null;
  return { image, cells: counted, along, vector, length: Math.sqrt(square), rests };
}

/** Cosines of a query with every token of an image, NaN where one does not count.
 * @param {Tokens} tokens
 * @param {number} perImage
 * @param {Query} query
 * @param {number} image
 * @returns {Float32Array} */
export function cosines(tokens, perImage, query, image) {
  const n = tokens.along.length, start = image * perImage, found = new Float32Array(perImage);
  for (let j = 0; j < tokens.dims; j++) {
    const v = query.vector[j] * tokens.step, at = j * n + start;
    for (let t = 0; t < perImage; t++) found[t] += v * tokens.codes[at + t];
  }
  for (let t = 0; t < perImage; t++) {
    let product = found[t] + query.along * tokens.along[start + t] / ALONG;
    if (image === query.image) product += query.rests.get(t) ?? 0;
    found[t] = tokens.norms[start + t] > 0 ? Math.min(1, Math.max(-1, product / query.length)) : NaN;
  }
  return found;
}

/** How far a query's likeness reaches among the other patches of its image: their mean, the mean of
 * the neighbours, the share above the middle between that mean and 1; NaN where there is none.
 * @param {Float32Array} values
 * @param {number[]} own the query's cells
 * @param {number[]} grid
 * @returns {{mean: number, neighbours: number, area: number}} */
export function reachOf(values, own, grid) {
  const cols = grid[1], mine = new Set(own);
  let sum = 0, n = 0, near = 0, nNear = 0, above = 0;
  values.forEach((value, cell) => {
    if (mine.has(cell) || Number.isNaN(value)) return;
    sum += value; n++;
    const row = Math.floor(cell / cols), col = cell % cols;
    if (own.some((o) => Math.abs(Math.floor(o / cols) - row) <= 1 && Math.abs(o % cols - col) <= 1)) { near += value; nNear++; }
  });
  const mean = sum / n;
  values.forEach((value, cell) => { if (!mine.has(cell) && value > (mean + 1) / 2) above++; });
  return { mean, neighbours: near / nNear, area: above / n };
}

/** The places of the largest values of several maps, the largest first.
 * @param {{image: number, values: Float32Array}[]} maps
 * @param {number} most
 * @returns {{image: number, cell: number, value: number}[]} */
export function nearest(maps, most) {
  /** @type {{image: number, cell: number, value: number}[]} */
  const found = [];
  for (const { image, values } of maps) for (let cell = 0; cell < values.length; cell++) {
    const value = values[cell];
    if (Number.isNaN(value) || (found.length === most && value <= found[most - 1].value)) continue;
    let at = found.length;
    while (at > 0 && found[at - 1].value < value) at--;
    found.splice(at, 0, { image, cell, value });
    if (found.length > most) found.pop();
  }
  return found;
}

/** A row of attention: values in parts of the row's largest.
 * @param {Uint16Array} most
 * @param {Uint8Array} values
 * @param {number} row
 * @param {number} cells
 * @returns {Float32Array} */
export function attentionRow(most, values, row, cells) {
  const scale = most[row] / ROW;
  return Float32Array.from(values.subarray(row * cells, (row + 1) * cells), (v) => v * scale);
}

/** The query of a coarse grid that stands for a cell, and its place among these.
 * @param {number[]} grid
 * @param {number} step
 * @param {number} cell
 * @returns {number} */
export function coarseOf(grid, step, cell) {
  const row = Math.floor(cell / grid[1]), col = cell % grid[1];
  return Math.floor(row / step) * Math.ceil(grid[1] / step) + Math.floor(col / step);
}

/** The smallest and largest number, others than NaN and those left out; null of none.
 * @param {Iterable<Float32Array>} maps
 * @param {(i: number) => boolean} [without]
 * @returns {number[] | null} */
export function rangeOf(maps, without) {
  let low = Infinity, high = -Infinity;
  for (const values of maps) for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i]) || without?.(i)) continue;
    low = Math.min(low, values[i]); high = Math.max(high, values[i]);
  }
  return low <= high ? [low, high] : null;
}

/** The median of what is a number; NaN of none.
 * @param {Float32Array} values
 * @returns {number} */
export function medianOf(values) {
  const known = values.filter((v) => !Number.isNaN(v)).sort(), n = known.length;
  return n ? (known[(n - 1) >> 1] + known[n >> 1]) / 2 : NaN;
}

// The numbers of a page as typed arrays. No document.

import { bfloat16, nCells } from "./arithmetic.js";

/** What `contents.py` and `page.py` describe.
 * @typedef {import("./arithmetic.js").Grid} Grid
 * @typedef {import("./arithmetic.js").Tokens} Tokens
 * @typedef {Grid & {name: string, words: string, short: string, rel_depth: number, channels: number, dims: number, step: number, error: {p99: number, largest: number, n_pairs: number}, colours: boolean, explained: number | null, lens: boolean}} SiteAbout
 * @typedef {Grid & {name: string, words: string, short: string, rel_depth: number, heads: number, queries: number[] | null, step: number}} BlockAbout
 * @typedef {{name: string, model: string, weights: string, remarks: string[], sites: SiteAbout[], attention: {from: string, blocks: BlockAbout[]} | string, lens: string | null}} ModelAbout
 * @typedef {{id: string, label: number, aspect: number, picture: string, edges: number[]}} ImageAbout
 * @typedef {{title: string, images: ImageAbout[], models: ModelAbout[], steps: {unit: string, numbers: number[]} | null, times?: string[], classes: Record<string, string>[], labels: Record<string, string>}} About */

/** A site with its numbers; colours: 3 a token; classes, shares: of each image the pooled tokens'
 * first, then its patches'.
 * @typedef {{about: SiteAbout, cells: number, tokens: Tokens, colours: Uint8Array | null, classes: Uint16Array | null, shares: Uint8Array | null}} Site
 * @typedef {{about: BlockAbout, cells: number, most: Uint16Array, values: Uint8Array, patchMost: Uint16Array | null, patchValues: Uint8Array | null}} Block
 * @typedef {{about: ModelAbout, sites: Site[], blocks: Block[]}} Model */

/** The bytes of a text that `pack` of `contents.py` wrote.
 * @param {string} text
 * @returns {Promise<ArrayBuffer>} */
export async function inflate(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Arrays one after another, each at a multiple of 4 bytes. */
class Reader {
  /** @param {ArrayBuffer} buffer */
  constructor(buffer) { this.buffer = buffer; this.at = 0; }
  /** @template T
   * @param {{new (buffer: ArrayBuffer, at: number, n: number): T, BYTES_PER_ELEMENT: number}} Kind
   * @param {number} n
   * @returns {T} */
  take(Kind, n) {
    const found = new Kind(this.buffer, this.at, n);
    this.at += Math.ceil(n * Kind.BYTES_PER_ELEMENT / 4) * 4;
    return found;
  }
}

/** Numbers of a kind, which a page may lack.
 * @typedef {(kind: string) => Promise<ArrayBuffer | null>} Blobs */

/** @param {Blobs} blobs
 * @param {string} kind */
const reading = async (blobs, kind) => new Reader(await blobs(kind) ?? new ArrayBuffer(0));

/** One store's sites.
 * @param {ModelAbout} about
 * @param {number} nImages
 * @param {Blobs} blobs
 * @returns {Promise<Site[]>} */
export async function readSites(about, nImages, blobs) {
  const kinds = ["tokens", "norms", "colours", "lens"];
  const [tokens, norms, colours, lens] = await Promise.all(kinds.map((kind) => reading(blobs, kind)));
  return about.sites.map((site) => {
    const cells = nCells(site), n = nImages * cells;
    return {
      about: site, cells,
      tokens: {
        along: tokens.take(Int16Array, n), codes: tokens.take(Int8Array, site.dims * n),
        dims: site.dims, step: site.step,
        norms: bfloat16(norms.take(Uint16Array, n)),
      },
      colours: site.colours ? colours.take(Uint8Array, 3 * n) : null,
      classes: site.lens ? lens.take(Uint16Array, nImages * (1 + cells)) : null,
      shares: site.lens ? lens.take(Uint8Array, nImages * (1 + cells)) : null,
    };
  });
}

/** One store's blocks with attention.
 * @param {ModelAbout} about
 * @param {number} nImages
 * @param {Blobs} blobs
 * @returns {Promise<Block[]>} */
export async function readBlocks(about, nImages, blobs) {
  const described = typeof about.attention === "string" ? [] : about.attention.blocks;
  const attention = await reading(blobs, "attention");
  return described.map((block) => {
    const cells = nCells(block), rows = nImages * block.heads;
    const queries = block.queries ? nImages * block.queries.length : 0;
    return {
      about: block, cells,
      most: attention.take(Uint16Array, rows), values: attention.take(Uint8Array, rows * cells),
      patchMost: queries ? attention.take(Uint16Array, queries) : null,
      patchValues: queries ? attention.take(Uint8Array, queries * cells) : null,
    };
  });
}

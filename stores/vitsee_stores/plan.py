"""What a store is to hold: token layouts, sites, attention groups, and the plan of all of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from vitsee_stores.canvas import Canvas


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a site lie: first the prefix tokens, then a grid or plain rows.

    prefix: kinds of the prefix tokens ("cls", "dist", "reg0", ...) in the model's order.
    grid: (rows, cols) in image geometry; None where the rows are no image grid, then `rows`
        counts them. stride_px: input pixels between neighbouring cells, (y, x). offset_px: the
        input pixel (y, x) at which cell (0, 0) begins, at its top and left edge: negative where
        the model pads there, positive where it crops.
    """

    prefix: tuple[str, ...]
    grid: tuple[int, int] | None
    rows: int = 0
    stride_px: tuple[float, float] | None = None
    offset_px: tuple[float, float] = (0.0, 0.0)

    @property
    def n_prefix(self) -> int:
        return len(self.prefix)

    @property
    def n_body(self) -> int:
        """Number of grid cells, or of rows where there is no grid."""
        return self.rows if self.grid is None else self.grid[0] * self.grid[1]

    @property
    def n_tokens(self) -> int:
        return self.n_prefix + self.n_body

    @property
    def cls(self) -> int | None:
        """Index of the class token, None without one."""
        return self.prefix.index("cls") if "cls" in self.prefix else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class SiteSpec:
    """One site as a store knows it.

    kind: "tokens" (a prefix and a grid), "rows" (no image grid), "vector", or "raw".
    shape: one image's: tokens (T, D), rows (R, D), vector (D,), raw as it is; dim: its channels,
        for raw its flattened size. dtype: of `acts/`; what is pooled or a vector is float32.
    alias_of: the site that holds an equal tensor and is stored in place of this one.
    tokens: "all", or "pooled" where `acts/` does not hold the site.
    """

    name: str
    part: str
    block: str | None
    groups: tuple[str, ...]
    kind: str
    dim: int
    shape: tuple[int, ...]
    layout: TokenLayout | None
    depth: int
    rel_depth: float
    alias_of: str | None = None
    tokens: str = "all"
    dtype: str = "float16"

    @property
    def stride_px(self) -> tuple[float, float] | None:
        """Input pixels between neighbouring cells (y, x); None without a grid."""
        return None if self.layout is None else self.layout.stride_px

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class AttentionGroup:
    """Blocks whose heads see one token layout; `prefix` is their folder below `attention/`, ""
    for the first group."""

    prefix: str
    blocks: tuple[str, ...]
    n_heads: tuple[int, ...]
    layout: TokenLayout

    @property
    def folder(self) -> str:
        return f"attention/{self.prefix}/" if self.prefix else "attention/"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ErfPlan:
    """Effective receptive fields: of the images with a row below `n_images`, at these sites (stored
    names); size: the input's (rows, cols) in pixels."""

    n_images: int
    sites: tuple[str, ...]
    size: tuple[int, int]


@dataclass(frozen=True)
class StorePlan:
    """Everything that decides which arrays a store has.

    sites: the chosen sites in the model's order, aliases included. attention_level: "none",
    "summary", "rows" or "full". sublayers: (name, layout) of the residual summaries.
    grams: whether every stored site that is no vector has its Gram matrix within each slab.
    erf: the effective receptive fields, None without any.
    inputs: (3, H, W) where pixels are kept. weights: (name, shape) of small weight arrays.
    places: (name, depth, rel_depth) of every block with attention and every sublayer: its index in
        the model among blocks or sublayers, and that over the last index.
    id_bytes: width of `samples/id`; set when a manifest is made. boxes: whether images are parts of
        their files, as `samples/box` has them; set when a manifest is made. canvas: on which images
        of several sizes lie, None where every image is brought to the model's input.
    """

    n_images: int
    slab: int
    codec: str
    sites: tuple[SiteSpec, ...]
    attention: tuple[AttentionGroup, ...] = ()
    attention_level: str = "none"
    rollout: bool = False
    sublayers: tuple[tuple[str, TokenLayout], ...] = ()
    inputs: tuple[int, int, int] | None = None
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    places: tuple[tuple[str, int, float], ...] = ()
    id_bytes: int = 1
    grams: bool = False
    erf: ErfPlan | None = None
    boxes: bool = False
    canvas: Canvas | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the additions to the format that the store makes use of."""
        used = {"box": self.boxes, "canvas": self.canvas is not None}
        return tuple(name for name, there in used.items() if there)

    @property
    def n_slabs(self) -> int:
        """Number of slabs, the last one perhaps short."""
        return math.ceil(self.n_images / self.slab)

    @property
    def gram_sites(self) -> tuple[SiteSpec, ...]:
        """The sites with a Gram matrix within each slab: stored ones, but for vectors, of which
        every value is kept anyway."""
        if not self.grams:
            return ()
        return tuple(s for s in self.sites if s.alias_of is None and s.kind != "vector")

    @property
    def n_erf_slabs(self) -> int:
        """Number of slabs with an image whose receptive fields are kept: the first ones."""
        return 0 if self.erf is None else math.ceil(self.erf.n_images / self.slab)

    def rows(self, slab: int) -> slice:
        """The images of a slab, as rows of the store."""
        return slice(slab * self.slab, min((slab + 1) * self.slab, self.n_images))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

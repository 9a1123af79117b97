"""The contents of a page, packed store by store: a description for JSON, and numbers in base64."""

from __future__ import annotations

import base64
import logging
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.patch_maps.colours import (
    CHANNELS,
    FEWEST,
    Colours,
    matched,
    rotation_to,
)
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.figures.patch_maps.views import Edges
from vitsee_core.pages.explore.readouts import (
    BlockAttention,
    SiteAnswers,
    pack_rows,
    query_cells,
    query_step,
)
from vitsee_core.pages.explore.tokens import (
    PackedTokens,
    SiteTokens,
    bfloat16,
    coarse_layout,
    pooled,
    pooled_side,
)
from vitsee_core.runtime.lanes import n_lanes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.statistics.covariance import CovarianceSums, principal_axes
from vitsee_core.tables.text import visible
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float, Float32, Mask
from vitsee_stores.layout import TokenLayout
from vitsee_stores.manifest import abbreviate, described_weights

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The first three scores of a site's patches. of: (images, cells, 3), NaN where a patch does
    not count; explained: their share of the variance, NaN where all patches are alike."""

    shown: SheetImages
    layout: TokenLayout
    of: Float
    explained: float


def scores_of(
    shown: SheetImages, layout: TokenLayout, x: Float32, counts: Mask
) -> Scores | None:
    """Scores of patches (images, cells, dim); None where fewer than two count, or with fewer
    channels than colours have.

    Args:
        shown: which images.
        layout: of the site.
        x: rows that do not count may hold anything.
        counts: (images, cells).
    """
    own = x[counts]
    if len(own) < 2 or x.shape[-1] < CHANNELS:
        return None
    axes = principal_axes(CovarianceSums.of(own, own[0].astype(np.float64)), CHANNELS)
    scores = np.full((*counts.shape, CHANNELS), np.nan)
    scores[counts] = axes.scores(own)
    return Scores(shown, layout, scores, float(axes.shares.sum()))


def colours_of(scores: Scores, guide: Scores | None) -> NDArray[np.uint8]:
    """(images, cells, 3) red, green and blue, turned to be nearest to the guide's where that has
    patches enough in the same places; 0 where a patch does not count."""
    turned = None
    n = 0
    if guide is not None and guide is not scores:
        pairs = [_pair(scores, guide, k) for k in range(len(scores.of))]
        own, lead = (np.concatenate(some) for some in zip(*pairs, strict=True))
        if len(own) >= FEWEST:
            turned = rotation_to(own, lead)
            n = len(own)
    colours = Colours.of(scores.of[~np.isnan(scores.of[..., 0])], turned, n)
    found = np.nan_to_num(colours(scores.of))
    return np.rint(255 * found).astype(np.uint8)


def _pair(scores: Scores, guide: Scores, k: int) -> tuple[Float, Float]:
    """Scores of both in the places of the guide's patches of image k."""
    own = scores.shown
    lead = guide.shown
    at = own.view.cells_like(
        scores.layout, own.rows[k], lead.view, guide.layout, lead.rows[k]
    )
    return matched(scores.of[k], ~np.isnan(scores.of[k, :, 0]), at, guide.of[k])


def reference(found: Sequence[Scores | None]) -> Scores | None:
    """The last site of the first store that has scores."""
    return next((scores for scores in reversed(found) if scores is not None), None)


DIGITS = 5  # of places on an image


def pack(arrays: Sequence[NDArray[np.generic]]) -> str:
    """Arrays as the page reads them: little endian, in C order, each begun at a multiple of 4
    bytes, their shapes and types known from elsewhere; deflated, in base64."""
    pieces = []
    for array in arrays:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        pieces.append(data + bytes(-len(data) % 4))
    return base64.b64encode(zlib.compress(b"".join(pieces), 9)).decode()


@dataclass(frozen=True)
class SiteContents:
    """One site on the page. layout: of the shown patches; norms: (images, patches), NaN where
    a patch does not count."""

    site: SiteSpec
    layout: TokenLayout
    tokens: SiteTokens
    norms: Float
    scores: Scores | None


@dataclass
class StoreContents:
    """One store on the page. attention, answers: what there is, or why there is none; packed:
    the tokens of each site, once all stores are read."""

    shown: SheetImages
    sites: list[SiteContents]
    attention: list[BlockAttention] | str
    answers: Mapping[str, SiteAnswers] | str
    packed: Sequence[PackedTokens] = ()

    @property
    def attention_bytes(self) -> int:
        """Bytes of attention before it is deflated, which saves little where heads are even."""
        if isinstance(self.attention, str):
            return 0
        kept = [part for one in self.attention for part in (one.heads, one.patches)]
        return sum(part.size for part in kept if part is not None)

    def describe(self, frames: Sequence[Edges]) -> dict[str, Any]:
        """The description that the page reads, as JSON values; see `assets/packed.js`. Texts are
        made visible."""
        store = self.shown.store
        return {
            "name": visible(store.label),
            "model": visible(without_folders(str(store.manifest.model.get("name", "")))),
            "weights": visible(described_weights(store.manifest)),
            "remarks": [visible(line) for line in coarse_remarks(self.shown)],
            "sites": [
                self._site(own, packed, frames)
                for own, packed in zip(self.sites, self.packed, strict=True)
            ],
            "attention": self._attention(frames),
            "lens": visible(self.answers) if isinstance(self.answers, str) else None,
        }

    def blobs(self, guide: Scores | None) -> dict[str, str]:
        """Kind -> numbers, in the order of the sites. guide: whose PCA colours the others are
        turned to."""
        scores = [own.scores for own in self.sites if own.scores is not None]
        found = {
            "tokens": pack(
                [part for own in self.packed for part in (own.along, own.codes)]
            ),
            "norms": pack([bfloat16(own.norms) for own in self.sites]),
            "colours": pack([colours_of(own, guide) for own in scores]),
        }
        if not isinstance(self.attention, str):
            rows: list[NDArray[Any]] = []
            for of_block in self.attention:
                rows += pack_rows(of_block.heads)
                rows += () if of_block.patches is None else pack_rows(of_block.patches)
            found["attention"] = pack(rows)
        if not isinstance(self.answers, str):
            names = [own.site.name for own in self.sites if own.site.name in self.answers]
            numbers = [self.answers[name] for name in names]
            found["lens"] = pack(
                [part for one in numbers for part in (one.classes, one.shares)]
            )
        return found

    def classes(self) -> set[int]:
        if isinstance(self.answers, str):
            return set()
        return {int(c) for own in self.answers.values() for c in np.unique(own.classes)}

    def _site(
        self, own: SiteContents, packed: PackedTokens, frames: Sequence[Edges]
    ) -> dict[str, Any]:
        site = own.site
        explained = None if own.scores is None else own.scores.explained
        return {
            "name": visible(site.name),
            "words": visible(site_words(site.name, site.block or "")),
            "short": visible(short_name(site.name, site.block or "")),
            "rel_depth": site.rel_depth,
            "channels": site.dim,
            "dims": len(packed.codes),
            "step": packed.step,
            "error": {
                name: round(value, 6) for name, value in asdict(packed.error).items()
            },
            "colours": explained is not None,
            "explained": None
            if explained is None or np.isnan(explained)
            else round(explained, 4),
            "lens": not isinstance(self.answers, str) and site.name in self.answers,
            **self._grid(own.layout, frames),
        }

    def _attention(self, frames: Sequence[Edges]) -> dict[str, Any] | str:
        if isinstance(self.attention, str):
            return visible(self.attention)
        # Of the block's own site: the page goes by depth, and attention alone counts otherwise.
        depths = {own.site.block: own.site.rel_depth for own in self.sites}
        blocks = []
        for own in self.attention:
            block = own.block
            layout = own.block.layout
            assert layout.grid is not None
            blocks.append(
                {
                    "name": visible(block.site),
                    "words": visible(site_words(block.site, block.site)),
                    "short": visible(short_name(block.site, block.site)),
                    "rel_depth": depths.get(block.site, block.rel_depth),
                    "heads": own.heads.shape[1],
                    "queries": None if own.patches is None else query_cells(layout.grid),
                    "step": query_step(layout.grid),
                    **self._grid(layout, frames),
                }
            )
        cls = all(own.block.layout.cls_tokens for own in self.attention)
        return {"from": "class token" if cls else "mean over patches", "blocks": blocks}

    def _grid(self, layout: TokenLayout, frames: Sequence[Edges]) -> dict[str, Any]:
        """The grid, and where it lies on each image's frame; once, where that is the same."""
        assert layout.grid is not None
        view = self.shown.view
        edges = [
            within(view.grid_edges(layout, row), frame)
            for row, frame in zip(self.shown.rows, frames, strict=True)
        ]
        same = all(one == edges[0] for one in edges)
        return {"grid": list(layout.grid), "edges": edges[:1] if same else edges}


def within(edges: Edges, frame: Edges) -> list[float]:
    """Edges on an image as shares of a frame on it."""
    top, left, bottom, right = frame
    height = bottom - top
    width = right - left
    y = ((edge - top) / height for edge in edges[::2])
    x = ((e - left) / width for e in edges[1::2])
    (y0, y1), (x0, x1) = y, x
    return [round(edge, DIGITS) for edge in (y0, x0, y1, x1)]


def without_folders(name: str) -> str:
    """A model's name for a page that others will see: of a path on this machine the last part."""
    return re.sub(r"(^|:)/(?!/)(?:[^/:]+/)*", r"\1", name)


def short_name(site: str, block: str) -> str:
    """A site in a few letters: `3` of `blocks.3.out`, `1.0` of `layer1.0.out`, `in` of what enters
    the first block."""
    if site in ("embed", "stem"):
        return "in"
    numbers = re.findall(r"\d+", block or site)
    if numbers:
        return ".".join(numbers)
    return site.rpartition(".")[2][:6]


def read_sites(
    shown: SheetImages, seed: int, advance: Callable[[int], None]
) -> list[SiteContents]:
    """The tokens of every site of a store, on their principal axes; what is not finite is left out,
    and logged.

    Memory: the shown images' patches of two sites in float32, and a slab of each; see `SiteTokens`.

    Raises:
        MissingInput: a site is stored pooled only.
    """
    found = []
    features = [
        choose_features(shown.store, x, "patches", partial=True) for x in shown.sites
    ]
    for own in thread_map(n_lanes(2))(partial(_read_site, shown, seed), features):
        found.append(own)
        advance(len(shown.rows))
    return found


def _read_site(shown: SheetImages, seed: int, features: SiteFeatures) -> SiteContents:
    rows = np.array(shown.rows, np.int64)
    site = features.site
    assert site.layout is not None
    layout = replace(
        site.layout, frames=None, stride_frames=None
    )  # of a clip at one place in time
    x = (
        features.arrays[0][shown.once]
        .astype(np.float32)
        .reshape(len(rows), layout.n_body, -1)
    )
    on_image = shown.view.on_image(layout, rows)
    finite = np.isfinite(x).all(-1)
    if lost := int((on_image & ~finite).sum()):
        log.warning(
            "%s: %d of the shown patches of %s hold numbers that are not finite (look at "
            "it "
            "with vitsee validate); they are shown as empty",
            shown.store.label,
            lost,
            site.name,
        )
    x, counts = pooled(x, on_image & finite, layout)
    layout = coarse_layout(layout)
    norms = np.full(counts.shape, np.nan)
    norms[counts] = np.linalg.norm(x[counts].astype(np.float64), axis=-1)
    long = counts & (norms > 0)
    tokens = SiteTokens(x.reshape(-1, x.shape[-1]), long.ravel(), seed)
    return SiteContents(site, layout, tokens, norms, scores_of(shown, layout, x, counts))


def coarse_remarks(shown: SheetImages) -> list[str]:
    """A line for each number of cells that shown patches are the means of."""
    sides: dict[int, list[str]] = {}
    for site in shown.sites:
        layout = shown.store.site(site.name).layout
        assert layout is not None
        if (side := pooled_side(layout)) > 1:
            sides.setdefault(side, []).append(site.name)
    found = [
        f"{abbreviate(names)}: a shown patch is the mean of {side} x {side} of the model's"
        for side, names in sides.items()
    ]
    if shown.times > 1:
        found.append("attention is the part that goes to patches of the frame shown")
    return found

"""Packs what a page shows of each store: a description for JSON, and numbers in base64."""

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
from vitsee_stores.manifest import abbreviate
from vitsee_stores.weights_names import described_weights

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The scores of a site's patches on the first three principal components.

    Attributes:
        shown: the images.
        layout: of the patches.
        values: (images, cells, 3), NaN where a patch does not count.
        explained: share of the variance, NaN where all patches are alike.
    """

    shown: SheetImages
    layout: TokenLayout
    values: Float
    explained: float


def scores_of(
    shown: SheetImages, layout: TokenLayout, x: Float32, counts: Mask
) -> Scores | None:
    """Return the scores of a site's patches on their own principal components.

    None if fewer than two patches count, or the site has fewer channels than colours have.

    Args:
        shown: the images.
        layout: of the site.
        x: (images, cells, dim); rows that do not count may hold anything.
        counts: (images, cells).
    """
    patches = x[counts]  # (patches that count, dim)
    if len(patches) < 2 or x.shape[-1] < CHANNELS:
        return None
    # Sums of what differs from one patch: their squares do not cancel where the mean is large.
    sums = CovarianceSums.from_examples(patches, patches[0].astype(np.float64))
    components = principal_axes(sums, CHANNELS)
    values = np.full((*counts.shape, CHANNELS), np.nan)
    values[counts] = components.scores(patches)
    return Scores(shown, layout, values, explained=float(components.shares.sum()))


def colours_of(scores: Scores, guide: Scores | None) -> NDArray[np.uint8]:
    """Return (images, cells, 3) red, green and blue; 0 where a patch does not count.

    Components have no order and sign that sites share: the scores are turned to be nearest to those
    of the guide, if there are enough patches at the same positions.
    """
    rotation = None
    n_pairs = 0
    if guide is not None and guide is not scores:
        site_scores = []
        guide_scores = []
        for k in range(len(scores.values)):
            of_site, of_guide = _match_patches(scores, guide, k)
            site_scores.append(of_site)
            guide_scores.append(of_guide)
        matched_scores = np.concatenate(site_scores)  # (pairs of patches, 3)
        if len(matched_scores) >= FEWEST:
            rotation = rotation_to(matched_scores, np.concatenate(guide_scores))
            n_pairs = len(matched_scores)
    is_counted = ~np.isnan(scores.values[..., 0])
    colours = Colours.of(scores.values[is_counted], rotation, n_pairs)
    rgb = np.nan_to_num(colours(scores.values))
    return np.rint(255 * rgb).astype(np.uint8)


def _match_patches(scores: Scores, guide: Scores, k: int) -> tuple[Float, Float]:
    """Return the scores (pairs, 3) of both sites at the guide's patches of image k."""
    site_images = scores.shown
    guide_images = guide.shown
    cells = site_images.view.cells_like(
        scores.layout,
        site_images.rows[k],
        guide_images.view,
        guide.layout,
        guide_images.rows[k],
    )
    is_counted = ~np.isnan(scores.values[k, :, 0])
    return matched(scores.values[k], is_counted, cells, guide.values[k])


def last_scores(sites: Sequence[SiteContents]) -> Scores | None:
    """Return the scores of the last site that has any; None if none has."""
    for site in reversed(sites):
        if site.scores is not None:
            return site.scores
    return None


DIGITS = 5  # of positions on an image, as shares of its sides


def pack(arrays: Sequence[NDArray[np.generic]]) -> str:
    """Return arrays as the page reads them: deflated, in base64.

    They are little endian, in C order, each begun at a multiple of 4 bytes. Their shapes and types
    follow from the description.
    """
    chunks = []
    for array in arrays:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        chunks.append(data + bytes(-len(data) % 4))
    return base64.b64encode(zlib.compress(b"".join(chunks), 9)).decode()


@dataclass(frozen=True)
class SiteContents:
    """One site on the page.

    Attributes:
        site: as the store describes it.
        layout: of the shown patches.
        tokens: of all shown images.
        norms: (images, patches), NaN where a patch does not count.
        scores: of the patches, None if they have none.
    """

    site: SiteSpec
    layout: TokenLayout
    tokens: SiteTokens
    norms: Float
    scores: Scores | None


@dataclass
class StoreContents:
    """One store on the page.

    Attributes:
        shown: the images.
        sites: of the store.
        attention: of its blocks, or the reason why there is none.
        answers: site -> the classifier's, or the reason why there are none.
        packed: the tokens of each site, once all stores are read.
    """

    shown: SheetImages
    sites: list[SiteContents]
    attention: list[BlockAttention] | str
    answers: Mapping[str, SiteAnswers] | str
    packed: Sequence[PackedTokens] = ()

    @property
    def attention_bytes(self) -> int:
        """The size of attention before it is deflated, which saves little where heads are even."""
        if isinstance(self.attention, str):
            return 0
        n_bytes = 0  # a value is a byte
        for block in self.attention:
            n_bytes += block.heads.size
            if block.patches is not None:
                n_bytes += block.patches.size
        return n_bytes

    def describe(self, frames: Sequence[Edges]) -> dict[str, Any]:
        """Return the description that the page's `assets/packed.js` reads, as JSON values.

        In texts control characters are written out.

        Args:
            frames: the edges of each image's frame on the page.
        """
        store = self.shown.store
        return {
            "name": visible(store.label),
            "model": visible(without_folders(str(store.manifest.model.get("name", "")))),
            "weights": visible(described_weights(store.manifest)),
            "remarks": [visible(line) for line in coarse_remarks(self.shown)],
            "sites": [
                self._describe_site(site, packed, frames)
                for site, packed in zip(self.sites, self.packed, strict=True)
            ],
            "attention": self._describe_attention(frames),
            "lens": visible(self.answers) if isinstance(self.answers, str) else None,
        }

    def blobs(self, guide: Scores | None) -> dict[str, str]:
        """Return kind of numbers -> packed arrays, in the order of the sites.

        Args:
            guide: the scores to which all PCA colours are turned.
        """
        tokens: list[NDArray[Any]] = []
        for packed in self.packed:
            tokens += [packed.along, packed.codes]
        scores = [site.scores for site in self.sites if site.scores is not None]
        blobs = {
            "tokens": pack(tokens),
            "norms": pack([bfloat16(site.norms) for site in self.sites]),
            "colours": pack([colours_of(site_scores, guide) for site_scores in scores]),
        }
        if not isinstance(self.attention, str):
            rows: list[NDArray[Any]] = []
            for block in self.attention:
                rows += pack_rows(block.heads)
                if block.patches is not None:
                    rows += pack_rows(block.patches)
            blobs["attention"] = pack(rows)
        if not isinstance(self.answers, str):
            answers: list[NDArray[Any]] = []
            for site in self.sites:
                if site.site.name in self.answers:
                    of_site = self.answers[site.site.name]
                    answers += [of_site.classes, of_site.shares]
            blobs["lens"] = pack(answers)
        return blobs

    def classes(self) -> set[int]:
        """Return the classes that the classifier answers anywhere."""
        if isinstance(self.answers, str):
            return set()
        classes: set[int] = set()
        for answers in self.answers.values():
            classes.update(np.unique(answers.classes).tolist())
        return classes

    def _describe_site(
        self, contents: SiteContents, packed: PackedTokens, frames: Sequence[Edges]
    ) -> dict[str, Any]:
        """Return the entry of one site in the description."""
        site = contents.site
        has_colours = contents.scores is not None
        explained = None  # JSON has no NaN
        if contents.scores is not None and not np.isnan(contents.scores.explained):
            explained = round(contents.scores.explained, 4)
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
            "colours": has_colours,
            "explained": explained,
            "lens": not isinstance(self.answers, str) and site.name in self.answers,
            **self._describe_grid(contents.layout, frames),
        }

    def _describe_attention(self, frames: Sequence[Edges]) -> dict[str, Any] | str:
        """Return the description of the attention, or the reason why there is none."""
        if isinstance(self.attention, str):
            return visible(self.attention)
        # The page aligns blocks and sites by depth: a block has that of its site. Blocks of
        # attention alone are counted among themselves.
        depths = {site.site.block: site.site.rel_depth for site in self.sites}
        blocks = []
        for attention in self.attention:
            block = attention.block
            layout = block.layout
            assert layout.grid is not None
            queries = None if attention.patches is None else query_cells(layout.grid)
            blocks.append(
                {
                    "name": visible(block.site),
                    "words": visible(site_words(block.site, block.site)),
                    "short": visible(short_name(block.site, block.site)),
                    "rel_depth": depths.get(block.site, block.rel_depth),
                    "heads": attention.heads.shape[1],
                    "queries": queries,
                    "step": query_step(layout.grid),
                    **self._describe_grid(layout, frames),
                }
            )
        has_cls = all(attention.block.layout.cls_tokens for attention in self.attention)
        source = "class token" if has_cls else "mean over patches"
        return {"from": source, "blocks": blocks}

    def _describe_grid(
        self, layout: TokenLayout, frames: Sequence[Edges]
    ) -> dict[str, Any]:
        """Return the grid and its edges on each image's frame; one entry if all are equal."""
        assert layout.grid is not None
        view = self.shown.view
        edges = [
            within(view.grid_edges(layout, row), frame)
            for row, frame in zip(self.shown.rows, frames, strict=True)
        ]
        if all(image_edges == edges[0] for image_edges in edges):
            edges = edges[:1]
        return {"grid": list(layout.grid), "edges": edges}


def within(edges: Edges, frame: Edges) -> list[float]:
    """Return edges (top, left, bottom, right) on an image as shares of a frame on it."""
    frame_top, frame_left, frame_bottom, frame_right = frame
    height = frame_bottom - frame_top
    width = frame_right - frame_left
    top, left, bottom, right = edges
    return [
        round((top - frame_top) / height, DIGITS),
        round((left - frame_left) / width, DIGITS),
        round((bottom - frame_top) / height, DIGITS),
        round((right - frame_left) / width, DIGITS),
    ]


def without_folders(name: str) -> str:
    """Return a model's name without the folders of a path on this machine: others see the page."""
    return re.sub(r"(^|:)/(?!/)(?:[^/:]+/)*", r"\1", name)


def short_name(site: str, block: str) -> str:
    """Return a site in a few letters: `3` of `blocks.3.out`, `1.0` of `layer1.0.out`.

    `in` of what enters the first block.
    """
    if site in ("embed", "stem"):
        return "in"
    numbers = re.findall(r"\d+", block or site)
    if numbers:
        return ".".join(numbers)
    return site.rpartition(".")[2][:6]


def read_sites(
    shown: SheetImages, seed: int, advance: Callable[[int], None]
) -> list[SiteContents]:
    """Return the tokens of every site of a store, on their principal axes.

    Patches that are not finite are left out, and logged.

    Memory: the shown images' patches of two sites in float32, a slab of each, and what `SiteTokens`
    keeps of all.

    Args:
        shown: the store, its sites and images.
        seed: of the sample of tokens whose cosines are compared.
        advance: called with a number of images as sites are read.

    Raises:
        MissingInput: a site is stored pooled only.
    """
    features = [
        choose_features(shown.store, site, "patches", partial=True)
        for site in shown.sites
    ]
    read_site = partial(_read_site, shown, seed)
    contents = []
    # Two lanes: reading a site waits for the disk while another one is decomposed.
    for site_contents in thread_map(n_lanes(2))(read_site, features):
        contents.append(site_contents)
        advance(len(shown.rows))
    return contents


def _read_site(shown: SheetImages, seed: int, features: SiteFeatures) -> SiteContents:
    """Return the tokens, norms and scores of one site."""
    rows = np.array(shown.rows, np.int64)
    site = features.site
    assert site.layout is not None
    # Each frame of a clip is an image here.
    layout = replace(site.layout, frames=None, stride_frames=None)
    stored = features.arrays[0][shown.unique_rows].astype(np.float32)
    x = stored.reshape(len(rows), layout.n_body, -1)  # (images, cells, dim)
    on_image = shown.view.on_image(layout, rows)
    is_finite = np.isfinite(x).all(-1)
    n_not_finite = int((on_image & ~is_finite).sum())
    if n_not_finite:
        log.warning(
            "%s: %d of the shown patches of %s hold numbers that are not finite (look at "
            "it with vitsee validate); they are shown as empty",
            shown.store.label,
            n_not_finite,
            site.name,
        )
    x, counts = pooled(x, on_image & is_finite, layout)
    layout = coarse_layout(layout)
    norms = np.full(counts.shape, np.nan)
    norms[counts] = np.linalg.norm(x[counts].astype(np.float64), axis=-1)
    # A token of length 0 has no direction.
    has_direction = counts & (norms > 0)
    return SiteContents(
        site=site,
        layout=layout,
        tokens=SiteTokens(x.reshape(-1, x.shape[-1]), has_direction.ravel(), seed),
        norms=norms,
        scores=scores_of(shown, layout, x, counts),
    )


def coarse_remarks(shown: SheetImages) -> list[str]:
    """Return a line for each number of cells whose mean is a shown patch, and one about clips."""
    sides: dict[int, list[str]] = {}
    for site in shown.sites:
        layout = shown.store.site(site.name).layout
        assert layout is not None
        side = pooled_side(layout)
        if side > 1:
            sides.setdefault(side, []).append(site.name)
    lines = []
    for side, names in sides.items():
        lines.append(
            f"{abbreviate(names)}: a shown patch is the mean of {side} x {side} of the "
            "model's"
        )
    if shown.times > 1:
        lines.append("attention is the part that goes to patches of the frame shown")
    return lines

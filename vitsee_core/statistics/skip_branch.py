"""Skip against branch: image-wise statistics from the stored dot products of residual sublayers.

A sublayer adds its branch f(z) to its skip z. A store keeps z.z, f.f and z.f of every token
(float32), and from these follow (Raghu et al. 2021, section 6, Figs. 7, E.1, E.2)

    norm_ratio = |z| / |f|
    cos_branch = z.f / (|z| |f|)
    cos_out    = z.(z + f) / (|z| |z + f|)

with z.(z + f) = z.z + z.f and |z + f|^2 = z.z + 2 z.f + f.f. Dot products add up over tokens, so
that all tokens of an image taken as one vector (Frobenius norms) have the same three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.store_selection import StoreSelection, select_each
from vitsee_core.tables.columns import StoredPart, block_of_sublayer
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import TokenLayout, select_names
from vitsee_stores.selectors import (
    NOT,
    TokenSelection,
    describe_layout,
    layout_tokens,
    split_patterns,
)

if TYPE_CHECKING:
    from vitsee_stores import Slab, Store


QUANTITIES = ("norm_ratio", "cos_branch", "cos_out", "skip_norm", "branch_norm")
TOKENS = ("each", "cls", "prefix", "patches", "all", "flat")
FLAT = -1  # stands for all tokens of an image, flattened
# |z + f|^2 from float32 products is off by up to about this part of z.z + f.f.
ROUNDING = 2.0**-22


@dataclass(frozen=True)
class StoredSublayer(StoredPart):
    """A residual sublayer whose dot products a store keeps."""

    @property
    def block(self) -> str:
        """The block that it is in."""
        return block_of_sublayer(self.site)


@dataclass(frozen=True)
class TokenPlace:
    """The place that a row of a table is about: one token, or the mean over several."""

    # "cls", "dist", "reg0", or "registers", "patches" for means; "flat" for all tokens as one
    # vector; the number of a row if the tokens form no grid; None for a cell
    token: str | None
    row: int | None  # of a cell
    col: int | None  # of a cell
    members: tuple[int, ...]  # indices of the tokens, or `FLAT`
    frame: int | None = None  # of a cell of a clip


def quantities(
    products: NDArray[np.floating], names: Sequence[str] = QUANTITIES
) -> dict[str, Float]:
    """Return name -> ratio, cosine or norm of each image and token, in float64, (...) each.

    NaN: `norm_ratio` where f = 0; `cos_branch` where z or f is 0; `cos_out` where z is 0 or z + f
    is 0 to within the rounding of the products. Where f = 0, `cos_out` is 1: the sublayer passes z
    on. Cosines beyond -1 or 1 by rounding are clipped.

    Args:
        products: (..., 3) z.z, f.f, z.f.
        names: some of `QUANTITIES`.
    """
    zz, ff, zf = np.moveaxis(products, -1, 0).astype(np.float64)
    return {name: _QUANTITY[name](zz, ff, zf) for name in names}


def _cos_out(zz: Float, ff: Float, zf: Float) -> Float:
    """Return the cosine of z and z + f; NaN where either is 0."""
    # |z + f|^2 = z.z + 2 z.f + f.f, which rounds to something else than 0 where f = -z.
    output_squared = zz + 2 * zf + ff
    output_squared[output_squared <= ROUNDING * (zz + ff)] = 0
    # z.(z + f) / (|z| |z + f|)
    return np.clip(_divide(zz + zf, np.sqrt(zz * output_squared)), -1, 1)


_QUANTITY: dict[str, Callable[[Float, Float, Float], Float]] = {
    "norm_ratio": lambda zz, ff, zf: np.sqrt(_divide(zz, ff)),
    "cos_branch": lambda zz, ff, zf: np.clip(_divide(zf, np.sqrt(zz * ff)), -1, 1),
    "cos_out": _cos_out,
    "skip_norm": lambda zz, ff, zf: np.sqrt(zz),
    "branch_norm": lambda zz, ff, zf: np.sqrt(ff),
}


def _divide(a: Float, b: Float) -> Float:
    """Return a / b, NaN where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Float = a / b
    ratio[b == 0] = np.nan
    return ratio


@dataclass(frozen=True)
class ReadQuantities:
    """Reads the quantities of a sublayer's tokens from a slab, for the images that count.

    Attributes:
        site: name of the sublayer.
        tokens: indices of the tokens, in this order; `FLAT`, if wanted, first.
        names: some of `QUANTITIES`.
    """

    site: str
    tokens: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, slab: Slab) -> tuple[dict[str, Float], int]:
        """Return name -> (tokens, images) of a quantity, and how many tokens have f = 0.

        Only the dot products of one sublayer are read.
        """
        all_products = slab.residual(self.site)[slab.valid]  # (images, tokens, 3)
        products = all_products
        if self.tokens != tuple(range(all_products.shape[1])):
            products = all_products[:, [token for token in self.tokens if token != FLAT]]
            if FLAT in self.tokens:
                # Dot products of flattened tokens are sums over tokens.
                flat = all_products.sum(1, dtype=np.float64, keepdims=True)
                products = np.concatenate([flat, products], axis=1)
        n_zero = int((products[..., 1] == 0).sum())
        by_name = quantities(products, self.names)
        return {name: values.T for name, values in by_name.items()}, n_zero


def choose_sublayers(
    stores: Sequence[Store], patterns: Sequence[str]
) -> StoreSelection[StoredSublayer]:
    """Return the sublayers of each store that the patterns name, in the model's order.

    A pattern is a sublayer's name (`blocks.3.attn`, `layer1.0`, `blocks.-1.mlp`), a glob, a kind
    (`attn`, `mlp`, `token`, `channel`), `blocks` for all, or a place in depth (`last`: the last
    block's). It need not match in every store.

    Raises:
        MissingInput: no store has dot products.
        SiteError: a pattern that matches in no store, or a store where none matches.
    """
    return select_each(stores, patterns, _select_sublayers)


def _sublayers(store: Store) -> list[StoredSublayer]:
    """Return all sublayers of a store. Raises MissingInput: it keeps no dot products."""
    plan = store.manifest.plan
    if not plan.sublayers:
        reason = store.manifest.left_out.get("residual")
        why = reason or "it was extracted with --no-residual (expected --residual)"
        raise MissingInput(f"{store.label} has no products of skips and branches: {why}")
    depths = {name: (depth, rel_depth) for name, depth, rel_depth in plan.places}
    return [
        StoredSublayer(name, *depths[name], layout) for name, layout in plan.sublayers
    ]


def _select_sublayers(store: Store, patterns: Sequence[str]) -> list[StoredSublayer]:
    """Return the sublayers of one store that the patterns name.

    Raises:
        MissingInput: the store keeps no dot products.
        SiteError: a pattern matches nothing.
    """
    sublayers = _sublayers(store)
    kinds = {sublayer.site.rpartition(".")[2] for sublayer in sublayers}
    expanded_patterns = []
    for pattern in split_patterns(patterns):
        kind = pattern.removeprefix(NOT)
        # `attn` stands for `*.attn`; `layer1.0` is a name whose last word is no kind.
        if kind in kinds and not kind.isdigit():
            pattern = f"{pattern.removesuffix(kind)}*.{kind}"
        expanded_patterns.append(pattern)
    sites = [sublayer.as_site("blocks", "residual") for sublayer in sublayers]
    chosen = select_names(
        expanded_patterns,
        sites,
        owner="store's sublayers",
        hint=f"vitsee info {store.place}",
    )
    names = {site.name for site in chosen}
    return [sublayer for sublayer in sublayers if sublayer.site in names]


def places_of(layout: TokenLayout, words: Iterable[str]) -> list[TokenPlace]:
    """Return the places that values of --tokens select, each once.

    There are none for tokens that the layout lacks.

    `each`: every token alone. `cls`: the class token. `prefix`: the prefix tokens, one place per
    kind, registers as their mean. `patches`: the mean over the grid (or over rows without a grid).
    `all`: `prefix` and `patches`. `flat`: all tokens as one vector. ROW,COL: one cell.
    """
    places: dict[TokenPlace, None] = {}
    singles = _single_tokens(layout)
    for word in words:
        if word == "flat":
            places[TokenPlace("flat", None, None, (FLAT,))] = None
        elif word in ("prefix", "patches", "all"):
            if word != "patches":
                places.update(dict.fromkeys(_prefix_kinds(layout)))
            if word != "prefix":
                body = tuple(range(layout.n_prefix, layout.n_tokens))
                places[TokenPlace("patches", None, None, body)] = None
        else:
            members = TokenSelection.parse(word, TOKENS).members(layout)
            places.update(dict.fromkeys(singles[i] for i in members))
    return list(places)


@lru_cache(maxsize=32)
def _single_tokens(layout: TokenLayout) -> tuple[TokenPlace, ...]:
    """Return the place of each token by itself, in the tokens' order."""
    return tuple(
        TokenPlace(
            token.name if token.row is None else None,
            token.row,
            token.col,
            (i,),
            token.frame,
        )
        for i, token in enumerate(layout_tokens(layout))
    )


def place_columns(places: Sequence[TokenPlace]) -> dict[str, list[str | int | None]]:
    """Return the columns `token`, `row` and `col` of rows about these places.

    Clips have a column `frame`, too.
    """
    columns: dict[str, list[str | int | None]] = {
        "token": [place.token for place in places]
    }
    if any(place.frame is not None for place in places):
        columns["frame"] = [place.frame for place in places]
    columns["row"] = [place.row for place in places]
    columns["col"] = [place.col for place in places]
    return columns


def _prefix_kinds(layout: TokenLayout) -> list[TokenPlace]:
    """Return a place per kind of prefix token: each token alone, but the mean of the registers."""
    kinds: dict[str, list[int]] = {}
    for i, name in enumerate(layout.prefix):
        kinds.setdefault("registers" if name.startswith("reg") else name, []).append(i)
    return [
        TokenPlace(kind, None, None, tuple(members)) for kind, members in kinds.items()
    ]


def missing_tokens(
    label: str, sublayers: Sequence[StoredSublayer], word: str
) -> str | None:
    """Return a remark if a value of --tokens matches no token in some sublayers of a store.

    None if it matches in all. label: of the store; word: the value.
    """
    lacking = [s for s in sublayers if not places_of(s.layout, [word])]
    if not lacking:
        return None
    names = ", ".join(sublayer.site for sublayer in lacking[:4])
    if len(lacking) > 4:
        names += ", ..."
    return (
        f"{label} has no tokens {word!r} in {len(lacking)} of {len(sublayers)} sublayers ({names}: "
        f"{describe_layout(lacking[0].layout)})"
    )

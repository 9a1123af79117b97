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
    @property
    def block(self) -> str:
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
    """Ratio, cosines and norms of each image and token, in float64, shape (...) each.

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
    total = zz + 2 * zf + ff
    total[total <= ROUNDING * (zz + ff)] = 0
    return np.clip(_over(zz + zf, np.sqrt(zz * total)), -1, 1)


_QUANTITY: dict[str, Callable[[Float, Float, Float], Float]] = {
    "norm_ratio": lambda zz, ff, zf: np.sqrt(_over(zz, ff)),
    "cos_branch": lambda zz, ff, zf: np.clip(_over(zf, np.sqrt(zz * ff)), -1, 1),
    "cos_out": _cos_out,
    "skip_norm": lambda zz, ff, zf: np.sqrt(zz),
    "branch_norm": lambda zz, ff, zf: np.sqrt(ff),
}


def _over(a: Float, b: Float) -> Float:
    """a / b, NaN where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Float = a / b
    ratio[b == 0] = np.nan
    return ratio


@dataclass(frozen=True)
class ReadQuantities:
    """Reads the quantities of one slab: a sublayer's tokens in this order (`FLAT` first), for the
    images that count."""

    site: str
    tokens: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, slab: Slab) -> tuple[dict[str, Float], int]:
        """Name -> (tokens, images) of a quantity; and the number of tokens of images with f = 0.
        Only the dot products of one sublayer are read."""
        products = slab.residual(self.site)[slab.valid]
        if self.tokens != tuple(range(products.shape[1])):
            flat = (
                products.sum(1, dtype=np.float64, keepdims=True)
                if FLAT in self.tokens
                else None
            )
            products = products[:, [token for token in self.tokens if token != FLAT]]
            if flat is not None:
                products = np.concatenate([flat, products], axis=1)
        n_zero = int((products[..., 1] == 0).sum())
        by_name = quantities(products, self.names)
        return {name: values.T for name, values in by_name.items()}, n_zero


def choose_sublayers(
    stores: Sequence[Store], patterns: Sequence[str]
) -> StoreSelection[StoredSublayer]:
    """The sublayers of each store that the patterns name, in the model's order.

    A pattern is a sublayer's name (`blocks.3.attn`, `layer1.0`, `blocks.-1.mlp`), a glob, a kind
    (`attn`, `mlp`, `token`, `channel`), `blocks` for all, or a place in depth (`last`: the last
    block's). It need not match in every store; see `select_each`.

    Raises:
        MissingInput: no store has dot products.
        SiteError: a pattern that matches in no store, or a store where none matches.
    """
    return select_each(stores, patterns, _select)


def _sublayers(store: Store) -> list[StoredSublayer]:
    plan = store.manifest.plan
    if not plan.sublayers:
        reason = store.manifest.left_out.get("residual")
        why = reason or "it was extracted with --no-residual (expected --residual)"
        raise MissingInput(f"{store.label} has no products of skips and branches: {why}")
    places = {name: (depth, rel_depth) for name, depth, rel_depth in plan.places}
    return [
        StoredSublayer(name, *places[name], layout) for name, layout in plan.sublayers
    ]


def _select(store: Store, patterns: Sequence[str]) -> list[StoredSublayer]:
    sublayers = _sublayers(store)
    kinds = {s.site.rpartition(".")[2] for s in sublayers}
    wanted = []
    for part in split_patterns(patterns):
        kind = part.removeprefix(NOT)
        of_kind = kind in kinds and not kind.isdigit()
        wanted.append(f"{part.removesuffix(kind)}*.{kind}" if of_kind else part)
    hint = f"vitsee info {store.place}"
    sites = [sublayer.as_site("blocks", "residual") for sublayer in sublayers]
    names = {
        s.name for s in select_names(wanted, sites, what="store's sublayers", hint=hint)
    }
    return [sublayer for sublayer in sublayers if sublayer.site in names]


def places_of(layout: TokenLayout, words: Iterable[str]) -> list[TokenPlace]:
    """The places selected by values of --tokens, each once; none for tokens that the layout lacks.

    `each`: every token alone. `cls`: the class token. `prefix`: the prefix tokens, one place per
    kind, registers as their mean. `patches`: the mean over the grid (or over rows without a grid).
    `all`: `prefix` and `patches`. `flat`: all tokens as one vector. ROW,COL: one cell.
    """
    places: dict[TokenPlace, None] = {}
    singles = _singles(layout)
    for word in words:
        if word == "flat":
            places[TokenPlace("flat", None, None, (FLAT,))] = None
        elif word in ("prefix", "patches", "all"):
            kinds = [] if word == "patches" else _prefix_kinds(layout)
            body = TokenPlace(
                "patches", None, None, tuple(range(layout.n_prefix, layout.n_tokens))
            )
            places |= dict.fromkeys([*kinds, *([] if word == "prefix" else [body])])
        else:
            members = TokenSelection.parse(word, TOKENS).members(layout)
            places |= dict.fromkeys(singles[i] for i in members)
    return list(places)


@lru_cache(maxsize=32)
def _singles(layout: TokenLayout) -> tuple[TokenPlace, ...]:
    """Each token by itself."""
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
    """The columns `token`, `row` and `col` of rows about these places, of clips `frame`, too."""
    in_time = any(place.frame is not None for place in places)
    names = ("token", *(("frame",) if in_time else ()), "row", "col")
    return {name: [getattr(place, name) for place in places] for name in names}


def _prefix_kinds(layout: TokenLayout) -> list[TokenPlace]:
    kinds: dict[str, list[int]] = {}
    for i, name in enumerate(layout.prefix):
        kinds.setdefault("registers" if name.startswith("reg") else name, []).append(i)
    return [
        TokenPlace(kind, None, None, tuple(members)) for kind, members in kinds.items()
    ]


def missing_tokens(
    label: str, sublayers: Sequence[StoredSublayer], word: str
) -> str | None:
    """A remark if a value of --tokens matches no token in some sublayers of a store; None if it
    matches in all."""
    without = [s for s in sublayers if not places_of(s.layout, [word])]
    if not without:
        return None
    names = ", ".join(s.site for s in without[:4]) + (", ..." if len(without) > 4 else "")
    return (
        f"{label} has no tokens {word!r} in {len(without)} of {len(sublayers)} sublayers ({names}: "
        f"{describe_layout(without[0].layout)})"
    )

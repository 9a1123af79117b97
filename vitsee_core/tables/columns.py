"""The columns of result tables: their names, their order, and the site columns.

Every table has its columns in one order, each only if the analysis has it:

1. `SITE`, where the row was measured; a comparison has these twice, `PAIR`;
2. `ABOUT`, what the row is about, then the analysis' own columns (`type`, `shots`, `l2`, `k`, ...);
3. `VALUES`: the metric's name, its value, the spread and what `std` is (`spread`);
   `NULL`, the value under chance;
4. counts (`n_images`, ...), then `baseline`, empty in the rows about the model.

`weights` distinguishes trained, random and ablated stores of one `model` (see `weights_name`).
`block` is the path of the site's block (`blocks.3`, `layer1.0`), empty outside of blocks, so that
the tables of different analyses join on store and block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vitsee_stores.plan import SiteSpec
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Store, TokenLayout

SITE = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
PAIR = tuple(f"{name}_{side}" for side in "ab" for name in SITE)
ABOUT = ("token", "row", "col", "head", "class", "query", "video", "object", "segment")
VALUES = ("metric", "value", "std", "low", "high", "spread")
NULL = ("null_mean", "tau", "p", "p_family", "calibrated")
# Columns whose rows are about part of the images.
PARTS = ("group", "query", "video", "object", "segment")
BASELINE = "baseline"
# What columns hold, for tables without a sidecar that says it: never numbers, whatever they look
# like (a store may be called 5), and always numbers, even where all of a column are empty.
_NUMBERS_OF_SITE = ("depth", "rel_depth")
TEXT = frozenset(
    (
        *(name for name in (*SITE, *PAIR) if not name.startswith(_NUMBERS_OF_SITE)),
        *("metric", "spread", "class", "token", BASELINE),
    )
)
NUMBERS = frozenset(
    (
        *(name for name in (*SITE, *PAIR) if name.startswith(_NUMBERS_OF_SITE)),
        *("value", "std", "low", "high", "n_images"),
    )
)
# Parts of a block that name a residual sublayer (`blocks.3.attn`).
SUBLAYERS = ("attn", "mlp", "token", "channel")


class Measured(Protocol):
    """A site, or a block or sublayer that is measured as a whole, with its name in rows, the
    path of its block, and its index among those of its kind, also over the last one's."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> str | None: ...
    @property
    def depth(self) -> int: ...
    @property
    def rel_depth(self) -> float: ...


@dataclass(frozen=True)
class StoredPart:
    """A block or sublayer that a store measured as a whole."""

    site: str  # its path
    depth: int  # its index in the model
    rel_depth: float  # that index over the last one's
    layout: TokenLayout  # of its tokens

    @property
    def name(self) -> str:
        return self.site

    @property
    def block(self) -> str:
        return self.site

    def as_site(self, *groups: str) -> SiteSpec:
        """In the form that selectors search, in these groups."""
        return SiteSpec(
            name=self.site,
            part="",
            block=self.block,
            groups=groups,
            kind="raw",
            dim=0,
            shape=(),
            layout=self.layout,
            depth=self.depth,
            rel_depth=self.rel_depth,
        )


def site_columns(store: Store, site: Measured, side: str = "") -> dict[str, Any]:
    """The cells of `SITE` for a row about a site of a store; side: "a" or "b" of a comparison."""
    model = store.manifest.model
    cells = (
        *(store.label, model.get("name", ""), weights_name(model)),
        *(site.name, site.block or "", site.depth, site.rel_depth),
    )
    end = f"_{side}" if side else ""
    return {f"{name}{end}": cell for name, cell in zip(SITE, cells, strict=True)}


def pair_columns(a: tuple[Store, Measured], b: tuple[Store, Measured]) -> dict[str, Any]:
    """The cells of `PAIR` for a row about two sites."""
    return site_columns(*a, "a") | site_columns(*b, "b")


def block_of_sublayer(name: str) -> str:
    """`blocks.3` for the sublayer `blocks.3.attn`; a sublayer that is a whole block is its own."""
    block, _, part = name.rpartition(".")
    return block if part in SUBLAYERS else name


def is_given(value: Any) -> bool:
    """Whether a cell has a value, in memory or read from a CSV."""
    return value is not None and value != "" and value == value

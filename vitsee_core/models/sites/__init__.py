"""Everything that can be captured of one model: the site table. `models.site_tables` makes and
proves it; here are what it says, and how it is built from a survey.

families    blocks recognised by the names of their modules
block_sums  blocks of any build, by their residual sums
attention   which blocks have one attention from every token to every token
build       names, order, groups, aliases and depths of sites
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitsee_core.models.hook_points import HookPoint, View
from vitsee_core.models.sites.families import Residual
from vitsee_core.models.survey.patches import Patches
from vitsee_core.models.tokens.clip_order import ClipOrder
from vitsee_core.models.tokens.packed_order import Order, Place
from vitsee_stores.layout import SiteSpec, TokenLayout


@dataclass(frozen=True)
class Sublayer:
    """A residual sublayer, named by its branch site ("blocks.3.attn", "layer1.0").

    index: among all sublayers of the model. kind: "attn", "mlp", "token", "channel" or "block".
    """

    name: str
    index: int
    kind: str
    layout: TokenLayout


@dataclass(frozen=True)
class AttentionBlock:
    """A token-to-token attention of a block, named by it, or by it and `time` or `space` where it
    has two; index: among the model's blocks; window: rows and columns of cells, of clips times
    before these, of the windows that its queries see, None where they see all tokens."""

    name: str
    index: int
    n_heads: int
    layout: TokenLayout
    window: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Point:
    """The places that a site's tensor comes from (its mean, if there are several, or the first less
    the second) and how it is read."""

    hook_points: tuple[HookPoint, ...]
    view: View
    difference: bool = False


@dataclass(frozen=True)
class SiteTable:
    """The sites of a model in the model's order, aliases included, and what it does not support.

    *_refusal: why nothing of that kind can be captured, None if something can.
    left_out: name of a module, block or sublayer -> why it has no site, attention or branch.
    remarks: on the table as a whole, for the user (blocks that are no chain).
    patches: the grids whose patches were measured, in the order of the forward pass.
    points, residuals, attention_modules, heads, turned, orders: for `Capture` and the self-check;
        turned: as `Trace.turned`; orders: of the tokens of packed images and of clips.
    """

    sites: tuple[SiteSpec, ...]
    sublayers: tuple[Sublayer, ...]
    attention: tuple[AttentionBlock, ...]
    attention_refusal: str | None
    residual_refusal: str | None
    rollout_refusal: str | None
    left_out: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    patches: tuple[Patches, ...] = ()
    points: Mapping[str, Point] = field(repr=False, default_factory=dict)
    residuals: Mapping[str, Residual] = field(repr=False, default_factory=dict)
    attention_modules: Mapping[str, str] = field(repr=False, default_factory=dict)
    heads: Mapping[str, HookPoint] = field(repr=False, default_factory=dict)
    turned: frozenset[tuple[str, bool]] = field(repr=False, default=frozenset())
    orders: Mapping[Place, Order | ClipOrder] = field(repr=False, default_factory=dict)

    def __getitem__(self, name: str) -> SiteSpec:
        """The site of this name."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)

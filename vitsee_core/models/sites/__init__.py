"""Everything that can be captured of one model: the site table. `models.site_tables` makes and
proves it; here are what it says, and how it is built from a survey.

families    blocks recognised by the names of their modules
block_sums  blocks of any build, by their residual sums
attention   which blocks have one attention from every token to every token
build       names, order, groups and readings of sites
drafts      aliases and depths of sites, and what a store records
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitsee_core.models.hook_points import HookPoint, ModuleSide, View
from vitsee_core.models.sites.families import Residual
from vitsee_core.models.survey.patches import Patches
from vitsee_core.models.tokens.clip_order import ClipOrder
from vitsee_core.models.tokens.packed_order import Order
from vitsee_stores.layout import SiteSpec, TokenLayout


@dataclass(frozen=True)
class Sublayer:
    """A residual sublayer, named by its branch site ("blocks.3.attn", "layer1.0").

    Attributes:
        name: the branch site without its last word.
        index: its number among all sublayers of the model.
        kind: "attn", "mlp", "token", "channel" or "block".
        layout: prefix tokens and grid of its tokens.
    """

    name: str
    index: int
    kind: str
    layout: TokenLayout


@dataclass(frozen=True)
class AttentionBlock:
    """A token-to-token attention of a block.

    Attributes:
        name: the block's path; with `time` or `space` behind it where the block has two.
        index: the block's number among the model's blocks.
        n_heads: attention heads.
        layout: prefix tokens and grid of its tokens.
        window: size of the windows that its queries see, (rows, cols) in cells of the grid, for
            clips (times, rows, cols); None where they see all tokens.
    """

    name: str
    index: int
    n_heads: int
    layout: TokenLayout
    window: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Point:
    """The hook points that a site's tensor comes from, and how it is read.

    Attributes:
        hook_points: one, or several whose mean is the site's tensor.
        view: how the tensor is read as tokens.
        difference: whether the site is the first hook point's tensor less the second's.
    """

    hook_points: tuple[HookPoint, ...]
    view: View
    difference: bool = False


@dataclass(frozen=True)
class SiteTable:
    """The sites of a model in the model's order, aliases included, and what it does not support.

    Attributes:
        sites: the sites.
        sublayers: the residual sublayers.
        attention: the attention that can be captured.
        attention_refusal, residual_refusal, rollout_refusal: why nothing of that kind can be
            captured; None if something can.
        left_out: name of a module, block or sublayer -> why it has no site, attention or branch.
        remarks: sentences on the table as a whole, for the user (blocks that do not form a chain).
        patches: the grids whose patches were measured, in the order of the forward pass.
        points: site -> where its tensor comes from.
        residuals: sublayer -> the sites of its skip, branch and sum.
        attention_modules: attention block -> path of its module.
        heads: attention block -> where the heads' outputs go next.
        turned: module sides whose tensors have tokens before images (`Trace.turned`).
        orders: module side -> the order of the tokens of packed images and of clips there.
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
    turned: frozenset[ModuleSide] = field(repr=False, default=frozenset())
    orders: Mapping[ModuleSide, Order | ClipOrder] = field(
        repr=False, default_factory=dict
    )

    def __getitem__(self, name: str) -> SiteSpec:
        """Return the site of this name. Raises KeyError: there is none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)

"""Sites in the making: which tensors are equal, the depth of each, and what a store records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitsee_core.models.hook_points import HookPoint, View
from vitsee_core.models.survey.tracing import Seen
from vitsee_stores.layout import SiteSpec, TokenLayout

MAX_PATH_LENGTH = 200  # letters of a site_path in a store
ENTRANCES = ("embed", "stem")
HEAD = ("norm", "pooled", "logits")
# Of equal tensors the one with the lowest rank is stored: the residual stream, then branches, then
# other named parts, then modules.
RANK = {"out": 0, "embed": 0, "stem": 0, "norm": 0, "pooled": 0, "logits": 0, "branch": 1}
MODULE_RANK = 3


@dataclass
class SiteDraft:
    """A site in the making: its names, where its tensor comes from and how it is read.

    Attributes:
        name: the site's name.
        part: its name within its block.
        block: its block's name, None outside of blocks.
        groups: the groups of sites that it belongs to.
        hook_points: where its tensor comes from.
        seen: that tensor in the survey.
        view: how it is read.
        alias_of: the site that is stored for it.
        module_only: whether it is known by its module's name alone, not by a word of the
            vocabulary of sites.
        difference: whether it is the first hook point's tensor less the second's.
    """

    name: str
    part: str
    block: str | None
    groups: set[str]
    hook_points: tuple[HookPoint, ...]
    seen: Seen
    view: View
    alias_of: str | None = None
    module_only: bool = False
    difference: bool = False

    @property
    def site_path(self) -> str | None:
        """The modules that the tensor comes from, as text; None where that is the site's name, the
        model itself, or too long for a store."""
        sides = []
        for point in self.hook_points:
            sides.append(f"{point.module}.in" if point.when == "in" else point.module)
        sign = " - " if self.difference else " + "
        path = sign.join(sides)
        if path in ("", self.name) or len(path) > MAX_PATH_LENGTH:
            return None
        return path

    @property
    def rank(self) -> int:
        """The order in which equal tensors are stored, the lowest first."""
        if self.module_only:
            return MODULE_RANK
        return RANK.get(self.part.rpartition(".")[2], 2)


def find_aliases(drafts: Sequence[SiteDraft]) -> None:
    """Mark every draft whose tensor is stored under another name, and add its groups to those of
    the draft that is stored."""
    owners: dict[tuple[int, int], SiteDraft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.rank):
        owner = owners.setdefault(draft.seen.key, draft)
        if owner is not draft:
            draft.alias_of = owner.name
            owner.groups |= draft.groups


def specs(drafts: Sequence[SiteDraft]) -> list[SiteSpec]:
    """Return the drafts as a store records them."""
    depths = _depths(drafts)
    sites = []
    for draft in drafts:
        depth, rel_depth = depths[draft.name]
        kind, shape, layout = _stored_form(draft)
        sites.append(
            SiteSpec(
                name=draft.name,
                part=draft.part,
                block=draft.block,
                groups=tuple(sorted(draft.groups | {"all"})),
                kind=kind,
                dim=math.prod(shape) if kind == "raw" else shape[-1],
                shape=shape,
                layout=layout,
                depth=depth,
                rel_depth=rel_depth,
                alias_of=draft.alias_of,
                site_path=draft.site_path,
            )
        )
    return sites


def _stored_form(
    draft: SiteDraft,
) -> tuple[str, tuple[int, ...], TokenLayout | None]:
    """Return a site's kind, the shape of one image and the layout of its tokens in a store."""
    form = draft.view.form
    shape = draft.seen.shape[1:]
    layout = draft.view.layout
    if form == "vector":
        return "vector", (math.prod(shape),), None
    if form == "raw" or layout is None:
        return "raw", shape, None
    if form == "rows":
        return "rows", shape, layout
    dim = shape[0] if form == "nchw" else shape[-1]
    return "tokens", (layout.n_tokens, dim), layout


def _depths(drafts: Sequence[SiteDraft]) -> dict[str, tuple[int, float]]:
    """Return name -> (depth, depth relative to the last).

    Sites of one kind are counted together, with the entrance as the first block output. Modules
    outside of blocks have the depth of the tokens that come to them, 0 before the first block.
    """
    drafts_by_kind: dict[str, list[SiteDraft]] = defaultdict(list)
    for draft in drafts:
        if draft.module_only and draft.block:
            drafts_by_kind[f"{draft.part} module"].append(draft)
        elif draft.module_only:
            continue
        elif draft.part in ENTRANCES:
            drafts_by_kind["out"].append(draft)
        elif draft.block:
            drafts_by_kind[draft.part].append(draft)
    depths: dict[str, tuple[int, float]] = {}
    last_block_depth = 0
    for kind, members in drafts_by_kind.items():
        # Without an entrance the first block still has depth 1.
        offset = int(kind == "out" and members[0].part not in ENTRANCES)
        last = len(members) - 1 + offset
        for i, draft in enumerate(members):
            depths[draft.name] = (i + offset, _ratio(i + offset, last))
        if kind == "out":
            last_block_depth = last

    block_outputs = [x for x in drafts if x.block and x.part == "out"]
    depth_so_far = 0
    for draft in drafts:
        if draft.block and draft.part == "out":
            depth_so_far, _ = depths[draft.name]
        if draft.name in depths:
            continue
        if draft.seen.grid is not None and draft.part not in HEAD:
            # Beside the blocks (a merger of an inner block's tokens): of those made before it.
            earlier = [x for x in block_outputs if x.seen.key < draft.seen.key]
            depth = max((depths[x.name][0] for x in earlier), default=0)
        elif draft.part in HEAD and not draft.module_only:
            depth = last_block_depth
        else:
            depth = depth_so_far
        depths[draft.name] = (depth, _ratio(depth, last_block_depth))
    return depths


def _ratio(depth: int, last: int) -> float:
    return depth / last if last else 0.0

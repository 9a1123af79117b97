"""Drafts of sites: which tensors are equal, the depth of each, and what a store keeps of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitsee_core.models.hook_points import HookPoint, View
from vitsee_core.models.trace import Seen
from vitsee_stores.layout import SiteSpec, TokenLayout

LONGEST_NAME = 200  # that a store may have
ENTRANCES = ("embed", "stem")
HEAD = ("norm", "pooled", "logits")
# Of equal tensors the one with the lowest rank is stored: the residual stream, then branches,
# then other named parts, then modules.
RANK = {"out": 0, "embed": 0, "stem": 0, "norm": 0, "pooled": 0, "logits": 0, "branch": 1}
MODULE_RANK = 3


@dataclass
class SiteDraft:
    """A site in the making: its names, where its tensor comes from and how it is read.

    module_only: known by its module's name alone, no part of the vocabulary. difference: of the
    first hook point's tensor and the second's.
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
        """See `SiteSpec`."""
        places = [f"{x.module}.in" if x.when == "in" else x.module for x in self.hook_points]
        path = (" - " if self.difference else " + ").join(places)
        return None if path in ("", self.name) or len(path) > LONGEST_NAME else path

    @property
    def rank(self) -> int:
        """Lower is rather stored."""
        return MODULE_RANK if self.module_only else RANK.get(self.part.rpartition(".")[2], 2)


def find_aliases(drafts: Sequence[SiteDraft]) -> None:
    """Mark every draft whose tensor another one is to stand for, and hand its groups over."""
    owners: dict[tuple[int, int], SiteDraft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.rank):
        owner = owners.setdefault(draft.seen.key, draft)
        if owner is not draft:
            draft.alias_of = owner.name
            owner.groups |= draft.groups


def specs(drafts: Sequence[SiteDraft]) -> list[SiteSpec]:
    """The drafts as a store knows them."""
    depths = _depths(drafts)
    sites = []
    for draft in drafts:
        depth, rel_depth = depths[draft.name]
        kind, shape, layout = _shape(draft)
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


def _shape(draft: SiteDraft) -> tuple[str, tuple[int, ...], TokenLayout | None]:
    """Kind, one image's shape and layout as the store has them."""
    form, shape, layout = draft.view.form, draft.seen.shape[1:], draft.view.layout
    if form == "vector":
        return "vector", (math.prod(shape),), None
    if form == "raw" or layout is None:
        return "raw", shape, None
    if form == "rows":
        return "rows", shape, layout
    dim = shape[0] if form == "nchw" else shape[-1]
    return "tokens", (layout.n_tokens, dim), layout


def _depths(drafts: Sequence[SiteDraft]) -> dict[str, tuple[int, float]]:
    """depth and rel_depth by name: sites of one kind are counted together; modules outside of
    blocks have the depth of the tokens that come to them, 0 before the first block."""
    kinds: dict[str, list[SiteDraft]] = defaultdict(list)
    for draft in drafts:
        if draft.module_only and draft.block:
            kinds[f"{draft.part} module"].append(draft)
        elif draft.module_only:
            continue
        elif draft.part in ENTRANCES:
            kinds["out"].append(draft)
        elif draft.block:
            kinds[draft.part].append(draft)
    depths: dict[str, tuple[int, float]] = {}
    last_out = 0
    for kind, members in kinds.items():
        # Without an entrance the first block still has depth 1.
        offset = int(kind == "out" and members[0].part not in ENTRANCES)
        last = len(members) - 1 + offset
        for i, draft in enumerate(members):
            depths[draft.name] = (i + offset, (i + offset) / last if last else 0.0)
        if kind == "out":
            last_out = last
    depth = 0
    for draft in drafts:
        if draft.block and draft.part == "out":
            depth = depths[draft.name][0]
        if draft.name not in depths:
            at = last_out if draft.part in HEAD and not draft.module_only else depth
            if draft.seen.grid is not None and draft.part not in HEAD:
                # Beside the blocks (a merger of an inner block's tokens): of those made before it.
                outs = [x for x in drafts if x.block and x.part == "out"]
                at = max(
                    (depths[x.name][0] for x in outs if x.seen.key < draft.seen.key), default=0
                )
            depths[draft.name] = (at, at / last_out if last_out else 0.0)
    return depths

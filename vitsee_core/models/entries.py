"""Sites in the making: which are equal, how deep they lie, and what a store is told of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vitsee_core.models.taps import Tap, View
from vitsee_core.models.trace import Seen
from vitsee_stores.layout import SiteSpec, TokenLayout

ENTRANCES = ("embed", "stem")
HEAD = ("norm", "pooled", "logits")
# Of equal tensors the one with the lowest rank is stored: the residual stream, then branches,
# then other named parts, then modules.
RANK = {"out": 0, "embed": 0, "stem": 0, "norm": 0, "pooled": 0, "logits": 0, "branch": 1}
MODULE_RANK = 3


@dataclass
class Entry:
    """A site in the making: its names, where its tensor comes from and how it is read.

    module_only: known by its module's name alone, no part of the vocabulary.
    """

    name: str
    part: str
    block: str | None
    groups: set[str]
    taps: tuple[Tap, ...]
    seen: Seen
    view: View
    alias_of: str | None = None
    module_only: bool = False

    @property
    def rank(self) -> int:
        """Lower is rather stored."""
        return MODULE_RANK if self.module_only else RANK.get(self.part.rpartition(".")[2], 2)


def find_aliases(entries: Sequence[Entry]) -> None:
    """Mark every entry whose tensor another one is to stand for, and hand its groups over."""
    owners: dict[tuple[int, int], Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.rank):
        owner = owners.setdefault(entry.seen.key, entry)
        if owner is not entry:
            entry.alias_of = owner.name
            owner.groups |= entry.groups


def specs(entries: Sequence[Entry]) -> list[SiteSpec]:
    """The entries as a store knows them."""
    depths = _depths(entries)
    sites = []
    for entry in entries:
        depth, rel_depth = depths[entry.name]
        kind, shape, layout = _shape(entry)
        sites.append(
            SiteSpec(
                name=entry.name,
                part=entry.part,
                block=entry.block,
                groups=tuple(sorted(entry.groups | {"all"})),
                kind=kind,
                dim=math.prod(shape) if kind == "raw" else shape[-1],
                shape=shape,
                layout=layout,
                depth=depth,
                rel_depth=rel_depth,
                alias_of=entry.alias_of,
            )
        )
    return sites


def _shape(entry: Entry) -> tuple[str, tuple[int, ...], TokenLayout | None]:
    """Kind, one image's shape and layout as the store has them."""
    form, shape, layout = entry.view.form, entry.seen.shape[1:], entry.view.layout
    if form == "vector":
        return "vector", (math.prod(shape),), None
    if form == "raw" or layout is None:
        return "raw", shape, None
    if form == "rows":
        return "rows", shape, layout
    dim = shape[0] if form == "nchw" else shape[-1]
    return "tokens", (layout.n_tokens, dim), layout


def _depths(entries: Sequence[Entry]) -> dict[str, tuple[int, float]]:
    """depth and rel_depth by name: sites of one kind are counted together."""
    kinds: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.module_only:
            kinds[f"{entry.part} module" if entry.block else "modules"].append(entry)
        elif entry.part in ENTRANCES:
            kinds["out"].append(entry)
        elif entry.block:
            kinds[entry.part].append(entry)
    depths: dict[str, tuple[int, float]] = {}
    last_out = 0
    for kind, members in kinds.items():
        # Without an entrance the first block still has depth 1.
        offset = int(kind == "out" and members[0].part not in ENTRANCES)
        last = len(members) - 1 + offset
        for i, entry in enumerate(members):
            depths[entry.name] = (i + offset, (i + offset) / last if last else 0.0)
        if kind == "out":
            last_out = last
    for entry in entries:
        if entry.part in HEAD and not entry.module_only:
            depths.setdefault(entry.name, (last_out, 1.0))
    return depths

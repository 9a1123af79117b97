"""The table of a model's sites, built from a survey: names, order, groups; which tensors are equal,
the depth of each, and what a store keeps of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from vitsee_core.models.hook_points import HookPoint, View
from vitsee_core.models.sites import Point, SiteTable, Sublayer
from vitsee_core.models.sites.attention import (
    Attention,
    attention_blocks,
    rollout_refusal,
)
from vitsee_core.models.sites.block_sums import describe
from vitsee_core.models.sites.families import BlockHook, Description, Residual
from vitsee_core.models.survey import Reader, Survey
from vitsee_core.models.survey.block_flow import block_inputs, flow_remark, side_by_side
from vitsee_core.models.survey.structure import (
    has_weights,
    head_hook_points,
    is_leaf,
    repeated_blocks,
)
from vitsee_core.models.survey.tracing import Seen
from vitsee_core.models.tokens.towers import PART, is_language_input
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
        places = [
            f"{x.module}.in" if x.when == "in" else x.module for x in self.hook_points
        ]
        path = (" - " if self.difference else " + ").join(places)
        if path in ("", self.name) or len(path) > LONGEST_NAME:
            return None
        return path

    @property
    def rank(self) -> int:
        """Lower is rather stored."""
        if self.module_only:
            return MODULE_RANK
        return RANK.get(self.part.rpartition(".")[2], 2)


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
                    (depths[x.name][0] for x in outs if x.seen.key < draft.seen.key),
                    default=0,
                )
            depths[draft.name] = (at, at / last_out if last_out else 0.0)
    return depths


NEVER_CALLED = "never called: the model uses its weights directly, if at all"


class TableBuilder:
    """Builds the table of one model; `demoted` names blocks whose sums or attention failed, with
    the reason of each reading that was tried, `ablated` sublayers that work without their skip."""

    def __init__(
        self,
        model: nn.Module,
        survey: Survey,
        demoted: Mapping[str, Sequence[str]],
        ablated: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.demoted = demoted
        self.ablated = set(ablated)
        self.trace = survey.trace
        self.geometry = survey.geometry
        self.blocks = survey.blocks
        self.left_out: dict[str, str] = {}
        self.entered: set[str] = set()
        self.n_made_up = 0
        self.read = Reader(model, survey)
        self.modules = self.read.modules
        self.index = {name: i for i, name in enumerate(self.modules)}
        self.names = survey.names
        self.repeated = [
            f"{path} runs {n} times in one forward pass, and depths that share a block have no site"
            for path, n in repeated_blocks(model, self.trace, self.blocks).items()
        ]
        self.inputs = block_inputs(self.trace, self.blocks)
        self.described: dict[str, Description] = {}
        for path in self.blocks:
            readings = describe(model, path, self.trace)
            tried = demoted.get(self.names[path], ())
            if len(tried) < len(readings):
                self.described[path] = readings[len(tried)]
            elif tried:
                self.left_out[self.names[path]] = tried[0]

    def build(self) -> SiteTable:
        """The table, its sites in the model's order."""
        drafts = self._unique(list(self._drafts()))
        find_aliases(drafts)
        sites = specs(drafts)
        by_name = {site.name: site for site in sites}
        sublayers, residuals = self._sublayers(by_name)
        attention = attention_blocks(self.read, self.names, self.demoted)
        remark = flow_remark(self.inputs, [self.names[path] for path in self.blocks])
        remarks = [*([] if remark is None else [remark]), *self.repeated[:1]]
        shared = next(iter(self.repeated), None) if not self.blocks else None
        residual_refusal = (
            None if sublayers else shared or "no block whose branches are known"
        )
        return SiteTable(
            sites=tuple(sites),
            sublayers=tuple(sublayers),
            attention=tuple(attention.blocks),
            attention_refusal=attention.refusal and (shared or attention.refusal),
            residual_refusal=residual_refusal,
            rollout_refusal=self._rollout_refusal(attention),
            left_out={**self.left_out, **attention.left_out},
            remarks=tuple(remarks),
            patches=self.geometry.patches,
            points={x.name: Point(x.hook_points, x.view, x.difference) for x in drafts},
            residuals=residuals,
            attention_modules=attention.modules,
            heads=attention.heads,
            turned=self.trace.turned(),
            orders=self.trace.orders,
        )

    def _rollout_refusal(self, attention: Attention) -> str | None:
        """Rollout's identity matrix stands for the skips around the attention."""
        cut = sorted(name for name in self.ablated if name.endswith(".attn"))
        if cut:
            return f"its identity stands for skips, and {cut[0]} works without its own"
        refusal = rollout_refusal(attention, len(self.blocks))
        if refusal is None and self.repeated:
            return self.repeated[0]
        apart = side_by_side(self.inputs)
        if refusal is None and apart is not None:
            block = self.names[self.blocks[apart]]
            before = self.names[self.blocks[apart - 1]]
            return f"{block} takes nothing of {before}, which ran before it: blocks are no chain"
        return refusal

    def _drafts(self) -> Iterator[SiteDraft]:
        """All sites in the model's order."""
        leaves = [
            name for name in self.modules if self._is_site(name) or self._merges(name)
        ]
        inside: dict[str | None, list[str]] = defaultdict(list)
        for name in leaves:
            inside[self._block_of(name)].append(name)
        head, missing = head_hook_points(self.model, self.trace, self.blocks)
        around = self._between_blocks(inside[None])
        yield from self._lone_modules(around[0], head)
        for i, path in enumerate(self.blocks):
            entrance = self._entrance(path, i)
            if entrance:
                yield entrance
            yield from self._block_drafts(path, inside[path])
            yield from self._lone_modules(around[i + 1], head)
        for part in ("pooled", "logits"):
            if part in head:
                yield from self._whole(part, head[part])
        self.left_out |= {k: v for k, v in missing.items() if k not in head}
        received = self.trace.left("") if is_language_input(self.model) else None
        if received is not None and received.grid is not None:
            view = View("tokens", self.geometry.layout(received.grid))
            yield SiteDraft(PART, PART, None, {"head"}, (HookPoint(""),), received, view)

    def _between_blocks(self, outside: Sequence[str]) -> list[list[str]]:
        """The modules outside of blocks that lie before the first block, behind it and so on: by
        their places in the model, or by when they ran where blocks ran in another order than they
        have there."""
        numbers = [self.index[path] for path in self.blocks]
        in_place = numbers == sorted(numbers)
        starts = numbers
        if not in_place:
            starts = [self.trace.calls[path][0].began for path in self.blocks]
        around: list[list[str]] = [[] for _ in range(len(self.blocks) + 1)]
        for name in outside:
            calls = self.trace.calls.get(name)
            at = self.index[name] if in_place or not calls else calls[0].began
            around[bisect_left(starts, at)].append(name)
        return around

    def _entrance(self, path: str, i: int) -> SiteDraft | None:
        """embed or stem before the first block, and embed before the blocks that follow a
        backbone of another kind."""
        root = path.split(".")[0]
        new_trunk = i == 0 or self.blocks[i - 1].split(".")[0] != root
        seen = self.trace.by_image(self.trace.entered(path))
        # A block that is a leaf is the end of a run of layers: its input is not the run's.
        if (
            not new_trunk
            or seen is None
            or len(seen.shape) < 3
            or is_leaf(self.modules[path])
        ):
            return None
        view = self.read.token_view(path, seen, entering=True)
        name = "stem" if view.form == "nchw" else "embed"
        if seen.shape[1:] == (3, *self.geometry.image) or (i and name in self.entered):
            return None
        self.entered.add(name)
        return SiteDraft(
            name, name, None, {"blocks"}, (HookPoint(path, "in"),), seen, view
        )

    def _block_drafts(self, path: str, leaves: list[str]) -> Iterator[SiteDraft]:
        described = self.described.get(path)
        parts = (
            described.parts
            if described
            else (BlockHook("out", HookPoint(path), ("blocks",)),)
        )
        named = {
            part.hook_point.module for part in parts if part.hook_point.when == "out"
        }
        named &= {f"{path}.{part.name}" for part in parts}
        base: list[View] = []
        for part in parts:
            seen = self.read.seen(part.hook_point)
            if seen is not None and part.name in ("in", "out", "shortcut"):
                base.append(
                    self.read.token_view(path, seen, part.hook_point.when == "in")
                )
        waiting = [name for name in leaves if name not in named]
        anchor = self.index[path]
        for part in parts:
            anchor = max(anchor, self.index[part.hook_point.module])
            limit = len(self.index) if part.name == "out" else anchor
            while waiting and self.index[waiting[0]] < limit:
                yield from self._module(waiting.pop(0), path, base, described)
            yield from self._part(path, part, base)
        for name in waiting:
            yield from self._module(name, path, base, described)

    def _part(self, path: str, part: BlockHook, base: list[View]) -> Iterator[SiteDraft]:
        name = f"{self.names[path]}.{part.name}"
        seen = self.read.seen(part.hook_point)
        if seen is None:
            self.left_out[name] = self.read.why_not(part.hook_point)
            return
        groups = set(part.groups)
        leaf = part.hook_point.when == "out" and is_leaf(
            self.modules[part.hook_point.module]
        )
        if leaf and f"{path}.{part.name}" == part.hook_point.module:
            groups.add("modules")
        if part.rows:
            view = View("rows", TokenLayout((), None, rows=seen.shape[1]))
        elif part.name in ("in", "out", "shortcut"):
            view = self.read.token_view(path, seen, part.hook_point.when == "in")
        else:
            view = self.read.inner_view(seen, base)
        hook_points: tuple[HookPoint, ...] = (part.hook_point,)
        if part.minus:
            hook_points = (part.hook_point, part.minus)
            seen = self._made_up(seen)
        block = self.names[path]
        yield SiteDraft(
            name,
            part.name,
            block,
            groups,
            hook_points,
            seen,
            view,
            difference=bool(part.minus),
        )

    def _made_up(self, seen: Seen) -> Seen:
        """A tensor that no module has, and that equals no other."""
        self.n_made_up += 1
        return replace(seen, key=(-self.n_made_up, 0))

    def _name(self, module: str) -> str:
        """A module's name among the sites: its block's, and its path in that."""
        block = self._block_of(module)
        if block is None:
            return module
        return f"{self.names[block]}{module[len(block) :]}"

    def _module(
        self, name: str, path: str, base: list[View], described: Description | None
    ) -> Iterator[SiteDraft]:
        seen = self.read.seen(HookPoint(name))
        if seen is None:
            self.left_out[self._name(name)] = self.read.why_not(HookPoint(name))
            return
        rows_below = described.rows_below if described else ()
        if (
            any(name == p or name.startswith(f"{p}.") for p in rows_below)
            and len(seen.shape) == 3
        ):
            view = View("rows", TokenLayout((), None, rows=seen.shape[1]))
        else:
            view = self.read.inner_view(seen, base)
        part = name.removeprefix(f"{path}.") if name != path else name.rpartition(".")[2]
        yield SiteDraft(
            self._name(name),
            part,
            self.names[path],
            self._module_groups(name),
            (HookPoint(name),),
            seen,
            view,
            module_only=True,
        )

    def _lone_modules(
        self, names: list[str], head: Mapping[str, tuple[HookPoint, ...]]
    ) -> Iterator[SiteDraft]:
        norm = head.get("norm", (None,))[0]
        for name in names:
            if norm is not None and name == norm.module:
                yield from self._whole("norm", head["norm"])
                continue
            seen = self.read.seen(HookPoint(name))
            if seen is None:
                self.left_out[name] = self.read.why_not(HookPoint(name))
                continue
            groups = self._module_groups(name)
            merges = self._merges(name)
            view = self.read.inner_view(seen, [])
            yield SiteDraft(
                name,
                name,
                None,
                groups,
                (HookPoint(name),),
                seen,
                view,
                module_only=not merges,
            )

    def _whole(
        self, part: str, hook_points: tuple[HookPoint, ...]
    ) -> Iterator[SiteDraft]:
        seen = self.read.seen(hook_points[0])
        if seen is None:
            self.left_out[part] = self.read.why_not(hook_points[0])
            return
        groups = {"head"} | ({"norms", "modules"} if part == "norm" else set())
        view = View("vector")
        if part == "norm":
            view = (
                self.read.token_view(self.blocks[-1], seen)
                if self.blocks
                else View("raw")
            )
        if len(hook_points) > 1:
            seen = self._made_up(seen)
        yield SiteDraft(part, part, None, groups, hook_points, seen, view)

    def _is_site(self, name: str) -> bool:
        module = self.modules[name]
        if (
            not name
            or isinstance(module, nn.Identity | nn.Dropout)
            or not is_leaf(module)
        ):
            return False
        parent = name.rpartition(".")[0]
        if parent and is_leaf(self.modules[parent]):
            return False
        calls = self.trace.calls.get(name)
        if not calls:
            if has_weights(module):
                self.left_out[self._name(name)] = NEVER_CALLED
            return False
        entered = calls[0].entered
        left = calls[0].left
        passes = entered is not None and left is not None and entered.key == left.key
        return not (len(calls) == 1 and passes)

    def _merges(self, name: str) -> bool:
        """Whether a module of several layers, outside of blocks and in no other such, makes tokens
        of a grid of its own of those of packed patches: a merger."""
        seen = self.trace.left(name)
        if not name or is_leaf(self.modules[name]) or self._block_of(name) is not None:
            return False
        if seen is None or seen.grid in (None, self.geometry.grid):
            return False
        above = name.rpartition(".")[0]
        return not above or not self._merges(above)

    def _block_of(self, name: str) -> str | None:
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if ".".join(parts[:n]) in self.read.block_index:
                return ".".join(parts[:n])
        return None

    def _module_groups(self, name: str) -> set[str]:
        kind = type(self.modules[name]).__name__.lower()
        return {"modules", "norms"} if "norm" in kind else {"modules"}

    def _unique(self, drafts: list[SiteDraft]) -> list[SiteDraft]:
        """The drafts without modules that are called like a site of the vocabulary."""
        taken = {draft.name for draft in drafts if not draft.module_only}
        clash = [draft for draft in drafts if draft.module_only and draft.name in taken]
        for draft in clash:
            self.left_out[f"{draft.name} (module)"] = (
                "its name is taken by the site of that name"
            )
        return [draft for draft in drafts if draft not in clash]

    def _sublayers(
        self, sites: Mapping[str, SiteSpec]
    ) -> tuple[list[Sublayer], dict[str, Residual]]:
        sublayers: list[Sublayer] = []
        residuals: dict[str, Residual] = {}
        for path, described in self.described.items():
            block = self.names[path]
            for residual in described.residuals:
                name = f"{block}.{residual.name}" if residual.name else block
                named = replace(
                    residual,
                    skip=f"{block}.{residual.skip}",
                    branch=f"{block}.{residual.branch}",
                    total=f"{block}.{residual.total}",
                    ablated=name in self.ablated,
                )
                ends = [sites.get(s) for s in (named.skip, named.branch, named.total)]
                if any(site is None or site.kind != "tokens" for site in ends):
                    self.left_out[name] = "skip, branch or sum are not tokens of one grid"
                    continue
                layout = ends[1].layout if ends[1] else None
                assert layout is not None
                residuals[name] = named
                sublayers.append(Sublayer(name, len(sublayers), residual.kind, layout))
        return sublayers, residuals

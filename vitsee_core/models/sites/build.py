"""The table of a model's sites, built from a survey: their names, order, groups and readings."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from vitsee_core.models.hook_points import HookPoint, View
from vitsee_core.models.sites import Point, SiteTable, Sublayer
from vitsee_core.models.sites.attention import (
    Attention,
    attention_blocks,
    rollout_refusal,
)
from vitsee_core.models.sites.block_sums import branch_modules, describe
from vitsee_core.models.sites.drafts import SiteDraft, find_aliases, specs
from vitsee_core.models.sites.families import BlockHook, Description, Residual
from vitsee_core.models.survey import Reader, Survey
from vitsee_core.models.survey.block_flow import block_inputs, flow_remark, side_by_side
from vitsee_core.models.survey.head import head_hook_points
from vitsee_core.models.survey.structure import (
    has_weights,
    is_leaf,
    repeated_blocks,
)
from vitsee_core.models.survey.tracing import Seen
from vitsee_core.models.tokens.towers import PART, computes_language_input
from vitsee_stores.layout import SiteSpec, TokenLayout

MOST_BRANCHES = 2  # of a block whose residual sums are read
NEVER_CALLED = "never called: the model uses its weights directly, if at all"


class TableBuilder:
    """Builds the site table of one model.

    Args:
        model: the model.
        survey: what forward passes showed of it.
        demoted: block, or "BLOCK attention", whose sums or attention were disproved -> the reason
            for each reading that was tried. The next reading is taken.
        ablated: sublayers that work without their skip connection.
    """

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
        # Tensors that no module has: differences and means of others.
        self.n_new_keys = 0
        self.read = Reader(model, survey)
        self.modules = self.read.modules
        # Its place in the order of definition, by which modules and parts are merged
        # below.
        self.index = {name: i for i, name in enumerate(self.modules)}
        self.names = survey.names
        self.repeated = [
            f"{path} runs {n_runs} times in one forward pass, and depths that share a "
            "block have no site"
            for path, n_runs in repeated_blocks(model, self.trace, self.blocks).items()
        ]
        self.inputs = block_inputs(self.trace, self.blocks)
        self.described: dict[str, Description] = {}
        # `demoted` holds a reason for each reading that images disproved: the next one is
        # taken.
        for path in self.blocks:
            readings = describe(model, path, self.trace)
            tried = demoted.get(self.names[path], ())
            if len(tried) < len(readings):
                self.described[path] = readings[len(tried)]
            elif tried:
                self.left_out[self.names[path]] = tried[0]
            else:
                # No reading fits: say so where the reason is that the block adds more
                # than two branches.
                added = branch_modules(model, path, self.trace)
                if len(added) > MOST_BRANCHES:
                    self.left_out[f"{self.names[path]} residual"] = (
                        f"it adds {len(added)} branches to its stream "
                        f"({', '.join(added)}), and residual sites are of blocks that "
                        f"add one or two"
                    )

    def build(self) -> SiteTable:
        """Return the table, its sites in the model's order."""
        # Equal tensors are one stored site, so aliases are found before anything refers
        # to sites.
        drafts = self._unique(list(self._drafts()))
        find_aliases(drafts)
        sites = specs(drafts)
        by_name = {site.name: site for site in sites}
        sublayers, residuals = self._sublayers(by_name)
        attention = attention_blocks(self.read, self.names, self.demoted)
        remarks = self.repeated[:1]
        remark = flow_remark(self.inputs, [self.names[path] for path in self.blocks])
        if remark is not None:
            remarks.insert(0, remark)
        # Blocks that are run several times are the reason why there are no others.
        refusal_of_repeats = None
        if self.repeated and not self.blocks:
            refusal_of_repeats = self.repeated[0]
        residual_refusal = None
        if not sublayers:
            residual_refusal = refusal_of_repeats or "no block whose branches are known"
        attention_refusal = attention.refusal
        if attention_refusal and refusal_of_repeats:
            attention_refusal = refusal_of_repeats
        return SiteTable(
            sites=tuple(sites),
            sublayers=tuple(sublayers),
            attention=tuple(attention.blocks),
            attention_refusal=attention_refusal,
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
        """Return why attention rollout is not defined, None where it is.

        Rollout multiplies the attention of all blocks, each with an identity matrix added for the
        skip around it (Abnar and Zuidema 2020). So blocks must be a chain, with their skips.
        """
        ablated = sorted(name for name in self.ablated if name.endswith(".attn"))
        if ablated:
            return (
                f"its identity stands for skips, and {ablated[0]} works without its own"
            )
        refusal = rollout_refusal(attention, len(self.blocks))
        if refusal is not None:
            return refusal
        if self.repeated:
            return self.repeated[0]
        index = side_by_side(self.inputs)
        if index is not None:
            block = self.names[self.blocks[index]]
            before = self.names[self.blocks[index - 1]]
            return f"{block} takes nothing of {before}, which ran before it: blocks are no chain"
        return None

    def _drafts(self) -> Iterator[SiteDraft]:
        """Yield all sites in the model's order."""
        leaves = [
            name for name in self.modules if self._is_site(name) or self._is_merger(name)
        ]
        # Block -> its modules; under None those outside of blocks.
        inside: dict[str | None, list[str]] = defaultdict(list)
        for name in leaves:
            inside[self._block_of(name)].append(name)
        head, missing = head_hook_points(self.model, self.trace, self.blocks)
        # In the model's order: stem, then each block and what follows it, then the head.
        between = self._between_blocks(inside[None])
        yield from self._lone_modules(between[0], head)
        for i, path in enumerate(self.blocks):
            entrance = self._entrance(path, i)
            if entrance:
                yield entrance
            yield from self._block_drafts(path, inside[path])
            yield from self._lone_modules(between[i + 1], head)
        for part in ("pooled", "logits"):
            if part in head:
                yield from self._head_drafts(part, head[part])
        for part, reason in missing.items():
            if part not in head:
                self.left_out[part] = reason
        # The tokens that a language model would receive are the output of the whole
        # tower.
        received = self.trace.left("") if computes_language_input(self.model) else None
        if received is not None and received.grid is not None:
            view = View("tokens", self.geometry.layout(received.grid))
            yield SiteDraft(
                name=PART,
                part=PART,
                block=None,
                groups={"head"},
                hook_points=(HookPoint(""),),
                seen=received,
                view=view,
            )

    def _between_blocks(self, outside: Sequence[str]) -> list[list[str]]:
        """Return the modules outside of blocks that come before the first block, behind it, and so
        on: (blocks + 1) lists.

        They go by the order of the model's modules; where blocks ran in another order, by when
        they ran.
        """
        starts = [self.index[path] for path in self.blocks]
        blocks_are_in_order = starts == sorted(starts)
        if not blocks_are_in_order:
            starts = [self.trace.calls[path][0].began for path in self.blocks]
        between: list[list[str]] = [[] for _ in range(len(self.blocks) + 1)]
        for name in outside:
            calls = self.trace.calls.get(name)
            position = self.index[name]
            if calls and not blocks_are_in_order:
                position = calls[0].began
            between[bisect_left(starts, position)].append(name)
        return between

    def _entrance(self, path: str, i: int) -> SiteDraft | None:
        """Return the site of a block's input where that begins a sequence of blocks: `embed`, or
        `stem` for a map; None elsewhere.

        A sequence begins at the first block, and where blocks follow a backbone of another kind.
        """
        # A backbone of another kind (a hybrid's) has another root.
        root = path.split(".")[0]
        is_first = i == 0 or self.blocks[i - 1].split(".")[0] != root
        seen = self.trace.by_image(self.trace.entered(path))
        if not is_first or seen is None or len(seen.shape) < 3:
            return None
        if is_leaf(self.modules[path]):
            # A block that is a leaf is the end of a run of layers: its input is not the run's.
            return None
        view = self.read.token_view(path, seen, entering=True)
        name = "stem" if view.form == "nchw" else "embed"
        # The images themselves are not a site, and a name is given to one site only.
        if seen.shape[1:] == (3, *self.geometry.image) or (i and name in self.entered):
            return None
        self.entered.add(name)
        return SiteDraft(
            name=name,
            part=name,
            block=None,
            groups={"blocks"},
            hook_points=(HookPoint(path, "in"),),
            seen=seen,
            view=view,
        )

    def _block_drafts(self, path: str, leaves: list[str]) -> Iterator[SiteDraft]:
        """Yield the sites of a block, its parts and its modules, in the order of its modules.

        leaves: paths of the block's modules without children that are sites.
        """
        described = self.described.get(path)
        parts: tuple[BlockHook, ...] = (BlockHook("out", HookPoint(path), ("blocks",)),)
        if described:
            parts = described.parts
        # Modules that are parts of the vocabulary by their own name have no second site.
        named = {
            part.hook_point.module for part in parts if part.hook_point.when == "out"
        }
        named &= {f"{path}.{part.name}" for part in parts}
        # How the block's own tokens lie: tensors inside are read by comparison with
        # these.
        base: list[View] = []
        for part in parts:
            seen = self.read.seen(part.hook_point)
            if seen is not None and part.name in ("in", "out", "shortcut"):
                base.append(
                    self.read.token_view(path, seen, part.hook_point.when == "in")
                )
        # Merge two lists, the parts in the order of the forward pass and the other
        # modules in that of definition. The anchor never falls: parts may be defined in
        # another order than they run.
        waiting = [name for name in leaves if name not in named]
        anchor = self.index[path]
        for part in parts:
            anchor = max(anchor, self.index[part.hook_point.module])
            # `out` is the block itself, which comes first in that order, and yet behind
            # all its modules.
            limit = len(self.index) if part.name == "out" else anchor
            while waiting and self.index[waiting[0]] < limit:
                yield from self._module(waiting.pop(0), path, base, described)
            yield from self._part(path, part, base)
        for name in waiting:
            yield from self._module(name, path, base, described)

    def _part(self, path: str, part: BlockHook, base: list[View]) -> Iterator[SiteDraft]:
        """Yield the site of one part of a block, or note why it has none.

        base: the readings of the block's input and output.
        """
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
            # (images, channels, hidden): no axis is the tokens'.
            view = View("rows", TokenLayout((), None, rows=seen.shape[1]))
        elif part.name in ("in", "out", "shortcut"):
            view = self.read.token_view(path, seen, part.hook_point.when == "in")
        else:
            view = self.read.inner_view(seen, base)
        hook_points: tuple[HookPoint, ...] = (part.hook_point,)
        if part.minus:
            # The difference is a new tensor: with the minuend's key it would be taken for
            # its alias.
            hook_points = (part.hook_point, part.minus)
            seen = self._with_new_key(seen)
        block = self.names[path]
        yield SiteDraft(
            name=name,
            part=part.name,
            block=block,
            groups=groups,
            hook_points=hook_points,
            seen=seen,
            view=view,
            difference=bool(part.minus),
        )

    def _with_new_key(self, seen: Seen) -> Seen:
        """Return a tensor's shape with an identity that equals no other: no module has the tensor
        itself."""
        self.n_new_keys += 1
        # Negative, as keys of a trace count from 1.
        return replace(seen, key=(-self.n_new_keys, 0))

    def _site_name(self, module: str) -> str:
        """Return a module's name among the sites: its block's name, and its path in the block."""
        block = self._block_of(module)
        if block is None:
            return module
        return f"{self.names[block]}{module[len(block) :]}"

    def _module(
        self, name: str, path: str, base: list[View], described: Description | None
    ) -> Iterator[SiteDraft]:
        """Yield the site of a module inside a block, or note why it has none.

        base: the readings of the block's input and output.
        """
        seen = self.read.seen(HookPoint(name))
        if seen is None:
            self.left_out[self._site_name(name)] = self.read.why_not(HookPoint(name))
            return
        rows_below = described.rows_below if described else ()
        works_on_rows = any(name == p or name.startswith(f"{p}.") for p in rows_below)
        # A map or a vector below them is read as elsewhere.
        if works_on_rows and len(seen.shape) == 3:
            view = View("rows", TokenLayout((), None, rows=seen.shape[1]))
        else:
            view = self.read.inner_view(seen, base)
        part = name.removeprefix(f"{path}.") if name != path else name.rpartition(".")[2]
        yield SiteDraft(
            name=self._site_name(name),
            part=part,
            block=self.names[path],
            groups=self._module_groups(name),
            hook_points=(HookPoint(name),),
            seen=seen,
            view=view,
            module_only=True,
        )

    def _lone_modules(
        self, names: list[str], head: Mapping[str, tuple[HookPoint, ...]]
    ) -> Iterator[SiteDraft]:
        """Yield the sites of modules outside of blocks; the final norm by its name in `head`."""
        norm = head.get("norm", (None,))[0]
        for name in names:
            if norm is not None and name == norm.module:
                yield from self._head_drafts("norm", head["norm"])
                continue
            seen = self.read.seen(HookPoint(name))
            if seen is None:
                self.left_out[name] = self.read.why_not(HookPoint(name))
                continue
            yield SiteDraft(
                name=name,
                part=name,
                block=None,
                groups=self._module_groups(name),
                hook_points=(HookPoint(name),),
                seen=seen,
                view=self.read.inner_view(seen, []),
                module_only=not self._is_merger(name),
            )

    def _head_drafts(
        self, part: str, hook_points: tuple[HookPoint, ...]
    ) -> Iterator[SiteDraft]:
        """Yield `norm`, `pooled` or `logits`, or note why it has no site."""
        seen = self.read.seen(hook_points[0])
        if seen is None:
            self.left_out[part] = self.read.why_not(hook_points[0])
            return
        groups = {"head"}
        view = View("vector")
        if part == "norm":
            groups |= {"norms", "modules"}
            view = View("raw")
            if self.blocks:
                view = self.read.token_view(self.blocks[-1], seen)
        # The mean of two classifiers' inputs (distillation) is a tensor of its own.
        if len(hook_points) > 1:
            seen = self._with_new_key(seen)
        yield SiteDraft(
            name=part,
            part=part,
            block=None,
            groups=groups,
            hook_points=hook_points,
            seen=seen,
            view=view,
        )

    def _is_site(self, name: str) -> bool:
        """Return whether a module's output is a site: a module without children that computes
        something. Note those with weights that were never called."""
        module = self.modules[name]
        if not name or not is_leaf(module):
            return False
        # Neither changes its input in eval mode.
        if isinstance(module, nn.Identity | nn.Dropout):
            return False
        # The activation inside a norm is part of that one site.
        parent = name.rpartition(".")[0]
        if parent and is_leaf(self.modules[parent]):
            return False
        calls = self.trace.calls.get(name)
        if not calls:
            if has_weights(module):
                self.left_out[self._site_name(name)] = NEVER_CALLED
            return False
        # A module that hands its input on is no site; with several calls the first says
        # too little.
        entered = calls[0].entered
        left = calls[0].left
        is_unchanged = (
            entered is not None and left is not None and entered.key == left.key
        )
        return not (len(calls) == 1 and is_unchanged)

    def _is_merger(self, name: str) -> bool:
        """Return whether a module is a merger: of several layers, outside of blocks, its output are
        tokens on another grid than that of the packed patches. A module inside a merger is none.
        """
        seen = self.trace.left(name)
        if not name or is_leaf(self.modules[name]) or self._block_of(name) is not None:
            return False
        if seen is None or seen.grid in (None, self.geometry.grid):
            return False
        above = name.rpartition(".")[0]
        return not above or not self._is_merger(above)

    def _block_of(self, name: str) -> str | None:
        """Return the path of the block that a module is in, None outside of blocks."""
        parts = name.split(".")
        # The innermost block, where one lies within another.
        for n in range(len(parts), 0, -1):
            if ".".join(parts[:n]) in self.read.block_index:
                return ".".join(parts[:n])
        return None

    def _module_groups(self, name: str) -> set[str]:
        kind = type(self.modules[name]).__name__.lower()
        return {"modules", "norms"} if "norm" in kind else {"modules"}

    def _unique(self, drafts: list[SiteDraft]) -> list[SiteDraft]:
        """Return the drafts without modules that are called like a site of the vocabulary."""
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
        """Return the residual sublayers, and name -> its sites; note those that are not tokens of
        one grid."""
        sublayers: list[Sublayer] = []
        residuals: dict[str, Residual] = {}
        # In the order of the blocks, which numbers the sublayers.
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
                # Products of skip and branch are taken token by token, so that all three
                # need one grid.
                ends = [sites.get(s) for s in (named.skip, named.branch, named.total)]
                if any(site is None or site.kind != "tokens" for site in ends):
                    self.left_out[name] = "skip, branch or sum are not tokens of one grid"
                    continue
                layout = ends[1].layout if ends[1] else None
                assert layout is not None
                residuals[name] = named
                sublayers.append(
                    Sublayer(
                        name, index=len(sublayers), kind=residual.kind, layout=layout
                    )
                )
        return sublayers, residuals

"""Blocks of any build, by their residual sums: which tensors the block adds, and which of these
enter and leave which modules, whatever the modules are called.

A block is read where its input and what one branch made are added to the stream between (`mid`),
which enters a module, and this and what a second branch made to the output; or where its input and
what one branch made are added to the output, or to what an activation makes the output of. Where a
block joins two inputs first (U-ViT), what a layer makes of both begins its stream. Where a block
changes the shape, a shortcut with fewer layers than the branch stands for the input. A branch
is what a module gave. Where that is scaled by a bare parameter before it is added (BEiT's
LayerScale), the branch is the difference of the sums around it, and what is proven is that it is
the last module's output times one factor per channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.sites.families import (
    FAMILIES,
    BlockHook,
    Description,
    Residual,
    enters,
    leaves,
)
from vitsee_core.models.survey.structure import has_weights, is_leaf, n_layers
from vitsee_core.models.survey.tracing import AttentionSeen, Key, Seen, Trace


def describe(model: nn.Module, path: str, trace: Trace) -> list[Description]:
    """Return the readings of a block, the likeliest first: by the first family that recognises it,
    then by its sums alone. Images decide which of them is true (`site_tables.verify`)."""
    readings = []
    block = model.get_submodule(path)
    for family in FAMILIES:
        by_family = family(block, path, trace)
        if by_family:
            readings.append(by_family)
            break
    by_residual_sums = by_sums(model, path, trace)
    if by_residual_sums:
        readings.append(by_residual_sums)
    return readings


class _Passage(NamedTuple):
    """A tensor that enters or leaves a module inside a block; norm: whether that is a norm."""

    seen: Seen
    hook_point: HookPoint
    norm: bool


class _Shortcut(NamedTuple):
    """The term of a sum that is a block's input, or made of it by fewer layers."""

    key: Key
    hook_point: HookPoint


class _Branch(NamedTuple):
    """A residual branch; witness: the output that it must be a multiple of, where it is only known
    as the difference of the sums around it."""

    part: BlockHook
    witness: HookPoint | None


def by_sums(model: nn.Module, path: str, trace: Trace) -> Description | None:
    """Return the parts of a block as its residual sums show them; None where they show none.

    Parts are in, norm1, attn.heads, attn.branch, mid, norm2, mlp.hidden, mlp.branch, out (token and
    channel where the first branch does not attend); or in, branch, out; or, with a layer on the
    skip or an activation behind the sum, branch, shortcut, out.
    """
    start = trace.by_image(trace.entered(path))
    end = trace.by_image(trace.left(path))
    if start is None or end is None or len(end.shape) not in (3, 4):
        return None
    block = _TracedBlock(model, path, trace, start, end)
    return block.two_branches() or block.one_branch() or block.joined_inputs()


def branch_modules(model: nn.Module, path: str, trace: Trace) -> list[str]:
    """Return, for each branch that a block adds to its stream one after the other, the name in the
    block of the module that gives it; [] where no chain of sums leads from the block's input to
    its output."""
    start = trace.by_image(trace.entered(path))
    end = trace.by_image(trace.left(path))
    if start is None or end is None:
        return []
    return _TracedBlock(model, path, trace, start, end).branch_modules()


class _TracedBlock:
    """The tensors of one block in a forward pass.

    Attributes:
        start: the tensor that the block's stream begins with.
        end: its output.
        origin: the part whose tensor `start` is.
        entering: inputs of the block's modules, in the order in which they were made.
        leaving: outputs of the block's modules.
    """

    def __init__(
        self, model: nn.Module, path: str, trace: Trace, start: Seen, end: Seen
    ) -> None:
        self.model = model
        self.path = path
        self.trace = trace
        self.start = start
        self.end = end
        self.origin = enters(path)
        self.entering: list[_Passage] = []
        self.leaving: list[_Passage] = []
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            if name == path:
                continue
            is_norm = "norm" in type(module).__name__.lower()
            calls = trace.calls.get(name, ())
            for i, call in enumerate(calls):
                entered = trace.by_image(call.entered)
                left = trace.by_image(call.left)
                if entered is not None:
                    point = HookPoint(name, "in", call=i, calls=len(calls))
                    self.entering.append(_Passage(entered, point, is_norm))
                if left is not None:
                    point = HookPoint(name, "out", call=i, calls=len(calls))
                    self.leaving.append(_Passage(left, point, is_norm))
        # Keys rise in the order in which tensors are first seen; named_modules is in
        # another order.
        self.entering.sort(key=lambda passage: passage.seen.key)

    def two_branches(self) -> Description | None:
        """Return the parts of a block of two branches with the stream (`mid`) between them."""
        for total, terms in self.trace.sums.items():
            if self.start.key not in terms or total == self.end.key:
                continue
            # `total` is mid if the output is a sum of it, and a module takes it.
            if self.other_term(self.end.key, total) is None:
                continue
            mid = next((p for p in self.entering if p.seen.key == total), None)
            if mid is None or not mid.seen.shape == self.start.shape == self.end.shape:
                continue
            # Without attention before mid the first branch mixes tokens in another way.
            names = ("attn", "mlp") if self.attends(total) else ("token", "channel")
            stream = BlockHook("mid", mid.hook_point, ("residual",))
            first = self.sublayer(
                names[0],
                skip=self.origin,
                before=self.start.key,
                total=stream,
                after=total,
            )
            second = self.sublayer(
                names[1],
                skip=stream,
                before=total,
                total=leaves(self.path),
                after=self.end.key,
            )
            if first and second:
                first_parts, first_residual = first
                second_parts, second_residual = second
                # `origin` is another part only where several inputs were joined first.
                parts = [enters(self.path)]
                if self.origin not in parts:
                    parts.append(self.origin)
                parts += [*first_parts, stream, *second_parts, leaves(self.path)]
                return Description(tuple(parts), (first_residual, second_residual))
        return None

    def one_branch(self) -> Description | None:
        """Return the parts of a block that is one branch beside a skip or a shortcut."""
        end, activation = self.residual_sum()
        shortcut = self.shortcut(end)
        if shortcut is None:
            return None
        # `in` keeps its name where the sum is plain; all else is a shortcut, as in
        # families.resnet.
        is_plain = shortcut.hook_point.when == "in" and activation is None
        skip_name = "in" if is_plain else "shortcut"
        skip = BlockHook(skip_name, shortcut.hook_point, ("residual",))
        total = leaves(self.path)
        branch = self.branch(
            "branch", skip=skip, before=shortcut.key, total=total, after=end
        )
        # A difference out - skip is the branch of a plain sum only, not behind an
        # activation.
        if branch is None or (branch.witness is not None and not is_plain):
            return None
        parts = (skip, branch.part, total) if is_plain else (branch.part, skip, total)
        residual = Residual(
            name="",
            kind="block",
            skip=skip.name,
            branch="branch",
            total="out",
            activation=activation,
            witness=branch.witness,
        )
        return Description(parts, (residual,))

    def joined_inputs(self) -> Description | None:
        """Return the parts of a block of two branches that joins several inputs first (U-ViT): its
        stream begins with the first output of a layer that is a term of a sum."""
        first = self.joined()
        if first is None:
            return None
        self.start = first.seen
        self.origin = BlockHook("shortcut", first.hook_point, ("residual",))
        return self.two_branches()

    def joined(self) -> _Passage | None:
        """Return the first output of a layer that is a term of a sum, in a block that takes several
        tensors; None without one."""
        # The stream and what a long skip brings.
        if len(self.trace.calls[self.path][0].inputs) < 2:
            return None
        terms = {key for pair in self.trace.sums.values() for key in pair}
        candidates = [
            passage
            for passage in self.leaving
            if passage.seen.shape == self.end.shape and passage.seen.key in terms
        ]
        return min(candidates, key=lambda passage: passage.seen.key, default=None)

    def branch_modules(self) -> list[str]:
        """Return the names that the function of this name returns."""
        stream = self.stream(self.end.key)
        # The same two readings as `describe` tries: from the input, or from what joins
        # the inputs.
        if not stream and (joined := self.joined()) is not None:
            self.start = joined.seen
            stream = self.stream(self.end.key)
        names = []
        for before, after in pairwise(stream):
            inside = [
                p.hook_point.module
                for p in self.leaving
                if before < p.seen.key < after and p.seen.shape == self.start.shape
            ]
            if not inside:
                return []
            # The child of the block that the last module is, or that holds it.
            names.append(inside[-1].removeprefix(f"{self.path}.").split(".")[0])
        return names

    def stream(self, total: Key) -> list[Key]:
        """Return the block's input and the sums that lead from it to a sum; [] where none do."""
        terms = self.trace.sums.get(total, ())
        if self.start.key in terms:
            return [self.start.key, total]
        for term in terms:
            # Terms are older than their sum and younger than the input: this ends.
            before = self.stream(term) if self.start.key < term < total else []
            if before:
                return [*before, total]
        return []

    def residual_sum(self) -> tuple[Key, str | None]:
        """Return the block's sum, and the path of the module without weights (an activation) that
        makes the output of it, None without one."""
        if self.end.key in self.trace.sums:
            return self.end.key, None
        # A module without weights whose output is the block's: the sum is its input.
        for passage in self.leaving:
            point = passage.hook_point
            entered = self.trace.calls[point.module][point.call].entered
            module = self.model.get_submodule(point.module)
            is_function = is_leaf(module) and not has_weights(module)
            if passage.seen.key == self.end.key and entered and is_function:
                return entered.key, point.module
        return self.end.key, None

    def shortcut(self, total: Key) -> _Shortcut | None:
        """Return which term of a sum is the block's input, and where it is captured.

        In a block that changes the shape it is the term that a module makes of the input with
        fewer layers than any that makes the other term.
        """
        terms = self.trace.sums.get(total, ())
        if self.start.key in terms:
            return _Shortcut(self.start.key, HookPoint(self.path, "in"))
        # Of the same shape, an input that is not a term was changed first: no shortcut.
        if self.start.shape == self.end.shape:
            return None
        # Both terms may come from the input; the shortcut is the one by fewer layers.
        n_layers_and_shortcuts = []
        for passage in self.leaving:
            point = passage.hook_point
            entered = self.trace.calls[point.module][point.call].entered
            if passage.seen.key in terms and entered and entered.key == self.start.key:
                layers = n_layers(self.model.get_submodule(point.module))
                shortcut = _Shortcut(passage.seen.key, point)
                n_layers_and_shortcuts.append((layers, shortcut))
        if not n_layers_and_shortcuts:
            return None
        n_fewest, fewest = min(
            n_layers_and_shortcuts, key=lambda pair: (pair[0], pair[1].key)
        )
        for layers, shortcut in n_layers_and_shortcuts:
            if layers == n_fewest and shortcut.key != fewest.key:
                return None  # both terms are as many layers from the input
        return fewest

    def sublayer(
        self, name: str, *, skip: BlockHook, before: Key, total: BlockHook, after: Key
    ) -> tuple[list[BlockHook], Residual] | None:
        """Return the parts of one branch, and its sum; None where the branch is not known.

        Args:
            name: "attn", "mlp", "token" or "channel".
            skip: the part that the branch is added to.
            before: its tensor.
            total: the part that is the sum.
            after: its tensor.
        """
        branch = self.branch(
            f"{name}.branch", skip=skip, before=before, total=total, after=after
        )
        if branch is None:
            return None
        residual = Residual(
            name=name,
            kind=name,
            skip=skip.name,
            branch=branch.part.name,
            total=total.name,
            witness=branch.witness,
        )
        return [*self.inner_parts(name, before, after), branch.part], residual

    def other_term(self, total: Key, term: Key) -> Key | None:
        """Return the other term of a sum; None where the total is not a sum with this term."""
        terms = self.trace.sums.get(total, ())
        if terms and term in terms:
            return terms[1 - terms.index(term)]
        return None

    def branch(
        self, name: str, *, skip: BlockHook, before: Key, total: BlockHook, after: Key
    ) -> _Branch | None:
        """Return the branch that is added to the stream: the output of a module, or else the
        difference of the sums, with the last module before it as its witness. The arguments are
        those of `sublayer`."""
        # By key, so that a module that returns its input unchanged counts as well.
        added = self.other_term(after, before)
        outputs = [p.hook_point for p in self.leaving if p.seen.key == added]
        if outputs:
            # The outermost module gives it last, as it is; so does the later of two in a row.
            depth = min(point.module.count(".") for point in outputs)
            outermost = [point for point in outputs if point.module.count(".") == depth]
            return _Branch(BlockHook(name, outermost[-1], ("residual",)), witness=None)
        # No module gives the term (BEiT's gamma * branch): modules that ran between the
        # sums.
        inside = [
            p
            for p in self.leaving
            if before < p.seen.key < after and p.seen.shape == self.start.shape
        ]
        if not inside:
            return None
        last = max(inside, key=lambda p: p.seen.key)
        part = BlockHook(name, total.hook_point, ("residual",), minus=skip.hook_point)
        return _Branch(part, witness=last.hook_point)

    def inner_parts(self, name: str, before: Key, after: Key) -> Iterator[BlockHook]:
        """Yield the parts inside a branch: the norm at its beginning, the heads' outputs, the MLP's
        hidden activations. The arguments are those of `sublayer`."""
        # The norm takes the stream itself; in a post-norm block none does.
        for passage in self.entering:
            is_called_once = passage.hook_point.calls == 1
            if passage.norm and is_called_once and passage.seen.key == before:
                number = 1 if before == self.start.key else 2
                yield BlockHook(
                    f"norm{number}", HookPoint(passage.hook_point.module), ("norms",)
                )
                break
        if name == "attn":
            value = self.value()
            heads = None
            if value is not None:
                heads = heads_hook_point(self.model, self.trace, self.path, value)
            if heads is not None:
                yield BlockHook("attn.heads", heads, ("heads",))
        if name == "mlp" and len(self.start.shape) == 3:
            # The last tensor before the sum with as many tokens and more channels.
            *batch_and_tokens, dim = self.start.shape
            wide = [
                p
                for p in self.entering
                if before < p.seen.key < after
                and p.hook_point.calls == 1
                and [*p.seen.shape[:-1]] == batch_and_tokens
                and p.seen.shape[-1] > dim
            ]
            if wide:
                yield BlockHook("mlp.hidden", wide[-1].hook_point, ("hidden",))

    def value(self) -> Seen | None:
        """Return the values of the block's attention, heads side by side; None where the block has
        no attention or several."""
        events = self.attention_events()
        return events[0].value if len(events) == 1 else None

    def attends(self, before: Key) -> bool:
        """Return whether attention was computed before a tensor of the block."""
        for event in self.attention_events():
            if event.value is None or event.value.key < before:
                return True
        return False

    def attention_events(self) -> list[AttentionSeen]:
        """Return the attention that the block's modules compute."""
        events = []
        for name, events_of_module in self.trace.events.items():
            if f"{name}.".startswith(f"{self.path}."):
                events += events_of_module
        return events


def heads_hook_point(
    model: nn.Module, trace: Trace, path: str, value: Seen
) -> HookPoint | None:
    """Return the input of the layer that the heads' outputs enter side by side.

    It is the layer below `path` that gets the first tensor of the values' shape that was made after
    the values; None if that is not a layer with a matrix of weights.
    """
    candidates = []
    for name, calls in trace.calls.items():
        # A layer that is called several times has no single input.
        if name.startswith(f"{path}.") and len(calls) == 1:
            seen = calls[0].entered
            if seen and seen.shape == value.shape and seen.key > value.key:
                candidates.append((seen.key, -name.count("."), name))
    if not candidates:
        return None
    # Of modules in one another the inner one: a projection within a layer of outputs.
    _, _, name = min(candidates)
    weight = getattr(model.get_submodule(name), "weight", None)
    if weight is not None and weight.ndim > 1:
        return HookPoint(name, "in")
    return None

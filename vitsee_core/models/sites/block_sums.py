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
from dataclasses import dataclass

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
from vitsee_core.models.survey.tracing import Key, Seen, Trace


def describe(model: nn.Module, path: str, trace: Trace) -> list[Description]:
    """The readings of a block, the likeliest first: by the family that recognises it, then by its
    sums alone. Which of them is true, pixels decide."""
    families = (family(model.get_submodule(path), path, trace) for family in FAMILIES)
    recognised = next((found for found in families if found), None)
    return [found for found in (recognised, by_sums(model, path, trace)) if found]


@dataclass(frozen=True)
class _Passage:
    """A tensor that enters or leaves a module inside a block; norm: a norm's."""

    seen: Seen
    hook_point: HookPoint
    norm: bool


def by_sums(model: nn.Module, path: str, trace: Trace) -> Description | None:
    """Parts in, norm1, attn.heads, attn.branch, mid, norm2, mlp.hidden, mlp.branch, out (token and
    channel where the first branch is no attention); or in, branch, out; or, with a layer on the
    skip or an activation behind the sum, branch, shortcut, out."""
    start = trace.by_image(trace.entered(path))
    end = trace.by_image(trace.left(path))
    if start is None or end is None or len(end.shape) not in (3, 4):
        return None
    block = _Block(model, path, trace, start, end)
    return block.two() or block.one() or block.joined()


class _Block:
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
            norm = "norm" in type(module).__name__.lower()
            calls = trace.calls.get(name, ())
            for i, call in enumerate(calls):
                entered = trace.by_image(call.entered)
                left = trace.by_image(call.left)
                if entered is not None:
                    place = HookPoint(name, "in", i, len(calls))
                    self.entering.append(_Passage(entered, place, norm))
                if left is not None:
                    place = HookPoint(name, "out", i, len(calls))
                    self.leaving.append(_Passage(left, place, norm))
        self.entering.sort(key=lambda passage: passage.seen.key)

    def two(self) -> Description | None:
        """Two branches, with the stream between them."""
        for total, terms in self.trace.sums.items():
            if self.start.key not in terms or total == self.end.key:
                continue
            last = self.other(self.end.key, total)
            mid = next((p for p in self.entering if p.seen.key == total), None)
            if (
                last is None
                or mid is None
                or not mid.seen.shape == self.start.shape == self.end.shape
            ):
                continue
            attends = self.attends(total)
            names = ("attn", "mlp") if attends else ("token", "channel")
            stream = BlockHook("mid", mid.hook_point, ("residual",))
            first = self.sublayer(names[0], self.origin, self.start.key, stream, total)
            second = self.sublayer(
                names[1], stream, total, leaves(self.path), self.end.key
            )
            if first and second:
                begin = dict.fromkeys((enters(self.path), self.origin))
                parts = (*begin, *first[0], stream, *second[0], leaves(self.path))
                return Description(parts, (first[1], second[1]))
        return None

    def one(self) -> Description | None:
        """A block that is one branch."""
        end, activation = self.summed()
        before = self.shortcut(end)
        if before is None:
            return None
        key, place = before
        plain = place.when == "in" and activation is None
        skip = BlockHook("in" if plain else "shortcut", place, ("residual",))
        total = leaves(self.path)
        branch = self.branch("branch", skip, key, total, end)
        if branch is None or (branch[1] is not None and not plain):
            return None
        part, witness = branch
        parts = (skip, part, total) if plain else (part, skip, total)
        residual = Residual(
            "", "block", skip.name, "branch", "out", activation, witness=witness
        )
        return Description(parts, (residual,))

    def joined(self) -> Description | None:
        """Two branches of a stream that begins with what a layer of the block made of its several
        inputs, the first such that is a term of a sum."""
        if len(self.trace.calls[self.path][0].inputs) < 2:
            return None
        terms = {key for pair in self.trace.sums.values() for key in pair}
        made = [
            p
            for p in self.leaving
            if p.seen.shape == self.end.shape and p.seen.key in terms
        ]
        if not made:
            return None
        first = min(made, key=lambda passage: passage.seen.key)
        self.start = first.seen
        self.origin = BlockHook("shortcut", first.hook_point, ("residual",))
        return self.two()

    def summed(self) -> tuple[Key, str | None]:
        """The block's sum, and the module without weights that makes the output of it, if any."""
        for passage in self.leaving if self.end.key not in self.trace.sums else ():
            place = passage.hook_point
            entered = self.trace.calls[place.module][place.call].entered
            module = self.model.get_submodule(place.module)
            alone = is_leaf(module) and not has_weights(module)
            if passage.seen.key == self.end.key and entered and alone:
                return entered.key, place.module
        return self.end.key, None

    def shortcut(self, total: Key) -> tuple[Key, HookPoint] | None:
        """Which term of a sum is the block's input, and where it is seen; in a block that changes
        the shape, which one a module makes of it with fewer layers than any that makes the
        other."""
        terms = self.trace.sums.get(total, ())
        if self.start.key in terms:
            return self.start.key, HookPoint(self.path, "in")
        found = []
        for passage in self.leaving if self.start.shape != self.end.shape else ():
            place = passage.hook_point
            entered = self.trace.calls[place.module][place.call].entered
            if passage.seen.key in terms and entered and entered.key == self.start.key:
                layers = n_layers(self.model.get_submodule(place.module))
                found.append((layers, passage.seen.key, place))
        found.sort(key=lambda one: one[:2])
        if not found or any(
            one[0] == found[0][0] and one[1] != found[0][1] for one in found
        ):
            return None
        return found[0][1:]

    def sublayer(
        self, name: str, skip: BlockHook, before: Key, total: BlockHook, after: Key
    ) -> tuple[list[BlockHook], Residual] | None:
        """The parts of one branch, and its sum."""
        branch = self.branch(f"{name}.branch", skip, before, total, after)
        if branch is None:
            return None
        part, witness = branch
        residual = Residual(name, name, skip.name, part.name, total.name, witness=witness)
        return [*self.inner(name, before, after), part], residual

    def other(self, total: Key, term: Key) -> Key | None:
        """The other term of a total; None where the total is no sum with this term."""
        terms = self.trace.sums.get(total, ())
        if terms and term in terms:
            return terms[1 - terms.index(term)]
        return None

    def branch(
        self, name: str, skip: BlockHook, before: Key, total: BlockHook, after: Key
    ) -> tuple[BlockHook, HookPoint | None] | None:
        """The branch that is added to the stream: the output of the module that gave it; else the
        difference of the sums, with the last module before it as its witness."""
        added = self.other(after, before)
        given = [p for p in self.leaving if p.seen.key == added]
        if given:
            # The outermost gives it last, as it is; so does the later one of two in a row.
            fewest = min(p.hook_point.module.count(".") for p in given)
            place = [p for p in given if p.hook_point.module.count(".") == fewest][
                -1
            ].hook_point
            return BlockHook(name, place, ("residual",)), None
        inside = [
            p
            for p in self.leaving
            if before < p.seen.key < after and p.seen.shape == self.start.shape
        ]
        if not inside:
            return None
        witness = max(inside, key=lambda p: p.seen.key).hook_point
        return BlockHook(
            name, total.hook_point, ("residual",), minus=skip.hook_point
        ), witness

    def inner(self, name: str, before: Key, after: Key) -> Iterator[BlockHook]:
        """The norm at a branch's beginning, the heads' outputs, the MLP's hidden activations."""
        for passage in self.entering:
            once = passage.hook_point.calls == 1
            if passage.norm and once and passage.seen.key == before:
                number = 1 if before == self.start.key else 2
                yield BlockHook(
                    f"norm{number}", HookPoint(passage.hook_point.module), ("norms",)
                )
                break
        if name == "attn":
            value = self.value()
            heads = value and heads_hook_point(self.model, self.trace, self.path, value)
            if heads:
                yield BlockHook("attn.heads", heads, ("heads",))
        if name == "mlp" and len(self.start.shape) == 3:
            *tokens, dim = self.start.shape
            wide = [
                p
                for p in self.entering
                if before < p.seen.key < after
                and p.hook_point.calls == 1
                and [*p.seen.shape[:-1]] == tokens
                and p.seen.shape[-1] > dim
            ]
            if wide:
                yield BlockHook("mlp.hidden", wide[-1].hook_point, ("hidden",))

    def value(self) -> Seen | None:
        """The values of the block's one attention, heads side by side."""
        events = [event for name in self.watched() for event in self.trace.events[name]]
        return events[0].value if len(events) == 1 else None

    def attends(self, before: Key) -> bool:
        """Whether the first branch computes attention."""
        events = [event for name in self.watched() for event in self.trace.events[name]]
        return any(event.value is None or event.value.key < before for event in events)

    def watched(self) -> list[str]:
        """The modules of the block that compute attention."""
        inside = f"{self.path}."
        return [name for name in self.trace.events if f"{name}.".startswith(inside)]


def heads_hook_point(
    model: nn.Module, trace: Trace, path: str, value: Seen
) -> HookPoint | None:
    """The layer that the heads' outputs enter side by side: what the first tensor of the values'
    shape enters that comes to a module below `path` after these were made, if that is a layer with
    a matrix of weights."""
    found = []
    for name, calls in trace.calls.items():
        if name.startswith(f"{path}.") and len(calls) == 1:
            seen = calls[0].entered
            if seen and seen.shape == value.shape and seen.key > value.key:
                found.append((seen.key, -name.count("."), name))
    if not found:
        return None
    # Of modules in one another the inner one: a projection within a layer of outputs.
    name = min(found)[2]
    weight = getattr(model.get_submodule(name), "weight", None)
    if weight is not None and weight.ndim > 1:
        return HookPoint(name, "in")
    return None

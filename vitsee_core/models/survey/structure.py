"""The structure of a model: which of its modules are its blocks, and which come after them, found
from how modules are nested and called; the same in every library, whatever modules lie around them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.survey.tracing import Key, Seen, Trace

CONTAINERS = ("blocks", "stages", "layers")
# So many layers in a row make a stack (VGG); fewer are the stem of something else.
MIN_STACK = 4
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LEAVES = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module does one thing: no children, or a norm that carries its activation."""
    return isinstance(module, _LEAVES) or not any(module.children())


def has_weights(module: nn.Module) -> bool:
    """Whether a module has parameters of its own or below."""
    return next(module.parameters(), None) is not None


def n_layers(module: nn.Module) -> int:
    """How many matrices of weights a module has, itself and below."""
    return sum(_is_weight(child) for child in module.modules())


def join(path: str, name: str) -> str:
    """The dotted path of a child."""
    return f"{path}.{name}" if path else name


def find_blocks(model: nn.Module, trace: Trace) -> list[str]:
    """Paths of the model's blocks in the order in which they ran.

    A block is what the model itself records as its hidden states (transformers); else a repeated
    child of the containers `blocks`, `stages` or `layers`, at the root or in a backbone below it;
    else a member of the list of one class that ran once each, gave tokens and holds most weights;
    in models without these, of the modules that follow one another at the root. Only what gives one
    activation with the batch in front counts.
    """
    finder = _BlockFinder(model, trace)
    found = finder.recorded() or finder.in_containers() or finder.lone_list()
    found = found or list(finder.trunk("", model))
    found = found or list(finder.runs(model, at_least=1))
    return sorted(found, key=lambda path: trace.calls[path][0].ended)


def repeated_blocks(
    model: nn.Module, trace: Trace, blocks: Sequence[str]
) -> dict[str, int]:
    """Return the modules that ran several times beside blocks of their class, as members of the
    same lists, with how often; of a model without blocks all of several layers that did."""
    alike = {
        (path.rpartition(".")[0], type(model.get_submodule(path))) for path in blocks
    }
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        n_calls = len(trace.calls.get(path, ()))
        inside = any(path.startswith(f"{other}.") for other in found)
        beside = not blocks or (path.rpartition(".")[0], type(module)) in alike
        if n_calls > 1 and beside and not inside and n_layers(module) > 1:
            found[path] = n_calls
    return found


def block_names(blocks: Sequence[str], trace: Trace) -> dict[str, str]:
    """Path of each block -> its name.

    A single list of blocks that are sequences of tokens, or all compute attention, on one grid, is
    `blocks.N`; of other paths what all have in common before a list goes:
    `encoder.layers.0.blocks.1` is `layers.0.blocks.1`.
    """
    if not blocks:
        return {}
    parents = {path.rpartition(".")[0] for path in blocks}
    if len(parents) == 1 and "" not in parents and _alike(blocks, trace):
        ends = [path.rpartition(".")[2] for path in blocks]
        numbers = [int(end) for end in ends if end.isdigit()]
        (parent,) = parents
        members = [name for name in trace.calls if name.rpartition(".")[0] == parent]
        once = all(len(trace.calls[name]) == 1 for name in members)
        if len(numbers) < len(ends) or (once and numbers == sorted(numbers)):
            numbers = list(range(len(ends)))
        # A list that ran in another order, or of which a member ran several times, keeps its own
        # numbers: depth is what counts the order.
        return {path: f"blocks.{n}" for path, n in zip(blocks, numbers, strict=True)}
    parts = [path.split(".") for path in blocks]
    n = 0
    while len(parts) > 1 and all(
        len(own) > n + 1 and own[n] == parts[0][n] for own in parts
    ):
        n += 1
    listed = n > 0 and all(own[n].isdigit() for own in parts)
    first = n - 1 if listed else 0  # the list's own name stays
    return {path: ".".join(own[first:]) for path, own in zip(blocks, parts, strict=True)}


class _BlockFinder:
    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model = model
        self.trace = trace

    def gives(self, path: str) -> Seen | None:
        """The activation a module gives when it is called once, if it has more than channels."""
        seen = self.trace.by_image(self.trace.left(path))
        return seen if seen and len(seen.shape) >= 3 else None

    def recorded(self) -> list[str]:
        """Blocks of the class that a model of transformers names in `_can_record_outputs`, each
        stage of these in its blocks, in the order of their calls."""
        for path, module in self.model.named_modules():
            stated = getattr(module, "_can_record_outputs", None)
            wanted = stated.get("hidden_states") if isinstance(stated, dict) else None
            kind = getattr(wanted, "target_class", wanted)
            within = getattr(wanted, "layer_name", None) or ""
            if not isinstance(kind, type):
                continue
            found: list[tuple[Key, str]] = []
            for below, child in module.named_modules(prefix=path):
                seen = self.gives(below) if within in below else None
                if seen is not None and isinstance(child, kind):
                    found.append((seen.key, below))
            if found:
                places = [
                    (below, self.model.get_submodule(below)) for _, below in sorted(found)
                ]
                return [x for below, child in places for x in self.expand(below, child)]
        return []

    def in_containers(self) -> list[str]:
        """Blocks in containers of the usual names; where other lists of blocks hold more weights
        than these (a tower that embeds the patches of a larger model), the members of both."""
        found = list(self.named("", self.model))
        if not found:
            return []
        others = [
            below
            for kids in self.token_lists()
            if not any(_one_holds_other(below, path) for below in kids for path in found)
            for below in kids
        ]
        weights = [
            _n_weights(map(self.model.get_submodule, paths)) for paths in (found, others)
        ]
        return [*found, *others] if weights[1] > weights[0] else found

    def token_lists(self) -> Iterator[list[str]]:
        """The paths of the members of each list of one class whose members ran once each and gave
        tokens."""
        for path, module in self.model.named_modules():
            kids = [join(path, name) for name, _ in module.named_children()]
            kinds = {type(kid) for kid in module.children() if not is_leaf(kid)}
            if not isinstance(module, _LISTS) or len(kids) < 2 or len(kinds) != 1:
                continue
            seen = [self.gives(below) for below in kids]
            if all(x is not None and len(x.shape) == 3 for x in seen):
                yield kids

    def lone_list(self) -> list[str]:
        """The members of the one list of a class that ran once each, gave tokens and hold most of
        the model's weights; [] where there are several such lists."""
        found: dict[type[nn.Module], list[list[str]]] = defaultdict(list)
        for kids in self.token_lists():
            found[_kind(self.model, kids)].append(kids)
        lone = [lists[0] for lists in found.values() if len(lists) == 1]
        half = _n_weights([self.model]) / 2
        large = [x for x in lone if _n_weights(map(self.model.get_submodule, x)) > half]
        return large[0] if large else []

    def named(self, path: str, module: nn.Module) -> Iterator[str]:
        """Blocks in containers of the usual names, wherever below `module` these are."""
        for name, child in module.named_children():
            below = join(path, name)
            if name in CONTAINERS and not is_leaf(child):
                found = list(self.trunk(below, child)) if self._holds_all(child) else []
                yield from found or self.expand(below, child, stages=name != "blocks")
            elif not is_leaf(child) and not isinstance(child, _LISTS):
                yield from self.named(below, child)

    def trunk(self, path: str, module: nn.Module) -> Iterator[str]:
        """Blocks among the composite children of `module`: those in lists, else those numbered
        like their siblings, else all of them."""
        kids = {}
        for name, child in module.named_children():
            mixed = isinstance(child, _LISTS) and self._mixed(child)
            if mixed and any(not is_leaf(kid) for kid in child.children()):
                found = list(self.trunk(join(path, name), child))
                if found:
                    yield from found
                    return
            elif not is_leaf(child) and not mixed and has_weights(child):
                kids[name] = child
        lists = {n: kid for n, kid in kids.items() if isinstance(kid, _LISTS)}
        stems = Counter(_stem(name) for name in kids)
        numbered = {
            n: kid for n, kid in kids.items() if n[-1].isdigit() and stems[_stem(n)] > 1
        }
        for chosen in (lists, numbered):
            found = list(self._each([(join(path, n), kid) for n, kid in chosen.items()]))
            if found:
                yield from found
                yield from self._middle(path, kids, found) if chosen is lists else ()
                return
        found = list(self.runs(module, path))
        if not found:
            found = list(self._each([(join(path, n), kid) for n, kid in kids.items()]))
        yield from found

    def _middle(
        self, path: str, kids: Mapping[str, nn.Module], listed: Sequence[str]
    ) -> Iterator[str]:
        """Siblings of lists, of a class of their members, that ran between these: the middle of
        a U."""
        kinds = {type(self.model.get_submodule(below)) for below in listed}
        ended = [self.trace.calls[below][0].ended for below in listed]
        for name, kid in kids.items():
            below = join(path, name)
            in_list = any(_one_holds_other(below, path) for path in listed)
            if type(kid) not in kinds or in_list or not self.gives(below):
                continue
            if min(ended) < self.trace.calls[below][0].ended < max(ended):
                yield below

    def _each(
        self, kids: list[tuple[str, nn.Module]], stages: bool = True
    ) -> Iterator[str]:
        """The blocks of several siblings; one layer with its norm is none beside real blocks."""
        several = [(below, kid) for below, kid in kids if n_layers(kid) > 1]
        for below, kid in several or kids:
            yield from self.expand(below, kid, stages)

    def expand(self, path: str, module: nn.Module, stages: bool = True) -> Iterator[str]:
        """The blocks that a container, a stage or a block itself stands for; `stages` while what
        is met may still be a stage."""
        kids = [
            (join(path, n), kid) for n, kid in module.named_children() if not is_leaf(kid)
        ]
        if isinstance(module, _LISTS) and kids and not self._mixed(module):
            yield from self._each(kids, stages)
            return
        for name in ("blocks", "layers"):
            inner = getattr(module, name, None)
            if not isinstance(inner, _LISTS) or all(map(is_leaf, inner.children())):
                continue
            below = join(path, name)
            if stages or not self.gives(path) or self._is_run(path, below, inner):
                found = list(self.expand(below, inner, stages=False))
                if found:
                    yield from found
                    return
        if stages and self._repeats(path, module, kids):
            yield from self._each(kids, stages=False)
        elif self.gives(path):
            yield path
        else:
            yield from self._each(kids, stages)

    def runs(
        self, model: nn.Module, path: str = "", at_least: int = MIN_STACK
    ) -> Iterator[str]:
        """The ends of layers in a plain stack of leaves: the last leaf before each next layer with
        a weight matrix."""
        for below, module in model.named_children():
            kids = list(module.named_children())
            layers = sum(_is_weight(kid) for _, kid in kids)
            if not isinstance(module, nn.Sequential) or layers < at_least:
                continue
            for (name, _), following in zip(kids, [*kids[1:], None], strict=True):
                ends = following is None or _is_weight(following[1])
                place = join(join(path, below), name)
                if ends and self.gives(place):
                    yield place

    def _holds_all(self, module: nn.Module) -> bool:
        """Whether a list of layers has lists of blocks among them (MNASNet)."""
        lists = (kid for kid in module.children() if isinstance(kid, _LISTS))
        return isinstance(module, _LISTS) and self._mixed(module) and any(lists)

    def _is_run(self, path: str, below: str, inner: nn.Module) -> bool:
        """Whether what a module gives is what the last of its blocks of one class gives."""
        name, last = list(inner.named_children())[-1]
        mine = self.gives(path)
        its = self.gives(join(below, name))
        lone = all(type(kid) is type(last) for kid in inner.children())
        return lone and mine is not None and its is not None and mine.key == its.key

    def _mixed(self, module: nn.Module) -> bool:
        """A list with weights of its own is one block, not a list of blocks."""
        return any(is_leaf(kid) and has_weights(kid) for kid in module.children())

    def _repeats(
        self, path: str, module: nn.Module, kids: list[tuple[str, nn.Module]]
    ) -> bool:
        """Whether the children are one thing again and again, the last one giving the result."""
        names = {_stem(below.rpartition(".")[2]) for below, _ in kids}
        numbered = all(below[-1].isdigit() for below, _ in kids)
        if not kids or not numbered or len(names) != 1 or self._mixed(module):
            return False
        mine = self.gives(path)
        last = self.gives(kids[-1][0])
        return mine is None or (last is not None and mine.key == last.key)


def _alike(blocks: Sequence[str], trace: Trace) -> bool:
    left = [trace.by_image(trace.left(path)) for path in blocks]
    shapes = {seen.shape for seen in left if seen is not None}
    if len(shapes) != 1 or None in left:
        return False
    (shape,) = shapes
    watched = [f"{module}." for module in trace.events]
    attend = all(
        any(module.startswith(f"{path}.") for module in watched) for path in blocks
    )
    return len(shape) == 3 or attend


def _kind(model: nn.Module, paths: Sequence[str]) -> type[nn.Module]:
    """The class of the first of these modules that has parts."""
    modules = map(model.get_submodule, paths)
    return next(type(module) for module in modules if not is_leaf(module))


def _one_holds_other(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _n_weights(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _stem(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _is_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim > 1


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The model's own classifier modules; a distilled model has two, others one a stage."""
    getter = getattr(model, "get_classifier", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, TypeError, NotImplementedError):
        found = None
    return list(_each(found))


def classifier_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of the names of the classifier's tensors, `head.`; () without a classifier."""
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(f"{names[id(m)]}." for m in classifiers(model) if id(m) in names)


def likely_classifiers(model: nn.Module) -> list[nn.Module]:
    """The classifier modules of a model that names them, else the last linear layer of another,
    which may be none: whether it gives the logits is for a forward pass to say."""
    if callable(getattr(model, "get_classifier", None)):
        return classifiers(model)
    linear: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linear[-1:]


def _each(found: object) -> Iterator[nn.Module]:
    """The modules in lists of lists."""
    if isinstance(found, tuple | list | nn.ModuleList):
        for entry in found:
            yield from _each(entry)
    elif isinstance(found, nn.Module):
        yield found


def _takes_vector(trace: Trace, name: str) -> bool:
    seen = trace.by_image(trace.entered(name))
    return seen is not None and all(n == 1 for n in seen.shape[2:])


def _layer(model: nn.Module, trace: Trace, name: str) -> str:
    """The module whose input is timm's pre-logits.

    The classifier itself if a vector goes into it, or the module around it that also has its norm
    (timm's NormLinear), unless that is a head that returns pre-logits from within; else the last
    layer inside of the classifier that has a weight matrix (it pools first).
    """
    if _takes_vector(trace, name):
        around = [name]
        while around[-1].count("."):
            around.append(around[-1].rpartition(".")[0])
        forwards = [model.get_submodule(path).forward for path in around]
        if any(
            "pre_logits" in inspect.signature(forward).parameters for forward in forwards
        ):
            return name
        return [path for path in around if _takes_vector(trace, path)][-1]
    inner = [
        below
        for below, module in model.get_submodule(name).named_modules(prefix=name)
        if isinstance(module, nn.Linear | nn.Conv2d) and trace.once(below)
    ]
    return inner[-1] if inner else name


def final_norm(model: nn.Module, trace: Trace, blocks: Sequence[str]) -> str | None:
    """The path of the norm over all tokens behind the last block: `norm` at the root, else the one
    that the last block's sequence of tokens enters; None without any."""
    norm = getattr(model, "norm", None)
    if isinstance(norm, nn.Module):
        return None if isinstance(norm, nn.Identity) else "norm"
    end = trace.left(blocks[-1]) if blocks else None
    if end is None or len(end.shape) != 3:
        return None
    for name, module in model.named_modules():
        seen = trace.entered(name)
        if "norm" in type(module).__name__.lower() and seen and seen.key == end.key:
            return str(name)
    return None


def head_hook_points(
    model: nn.Module, trace: Trace, blocks: Sequence[str] = ()
) -> tuple[dict[str, tuple[HookPoint, ...]], dict[str, str]]:
    """Taps of `norm`, `pooled` and `logits`, and the reason for each that the model has not.

    pooled: timm's pre-logits, forward_head(pre_logits=True): what goes into the classifier, before
    a norm that is part of it; where there are two (distillation), the mean of what goes into each.
    """
    hook_points: dict[str, tuple[HookPoint, ...]] = {}
    missing: dict[str, str] = {}
    norm = final_norm(model, trace, blocks)
    after = None if norm is None else trace.by_image(trace.left(norm))
    if norm is not None and after and len(after.shape) >= 3:
        hook_points["norm"] = (HookPoint(norm),)
    names = {id(module): name for name, module in model.named_modules()}
    output = trace.by_image(trace.left(""))
    own = classifiers(model) or [
        module
        for module in likely_classifiers(model)
        if output and (left := trace.left(names[id(module)])) and left.key == output.key
    ]
    found = [names[id(module)] for module in own if id(module) in names]
    found = [_layer(model, trace, name) for name in found]
    entered = [trace.by_image(trace.entered(name)) for name in found]
    vectors = [x for x in entered if x and all(n == 1 for n in x.shape[2:])]
    if len({x.shape for x in vectors}) > 1:
        missing["pooled"] = "several classifiers, on vectors of different sizes"
    elif found and len(vectors) == len(found):
        same = len({x.key for x in vectors}) == 1
        hook_points["pooled"] = tuple(
            HookPoint(name, "in") for name in (found[:1] if same else found)
        )
    else:
        missing["pooled"] = "no vector goes into the classifier"
    is_head = any(not isinstance(module, nn.Identity) for module in own)
    if output is None or len(output.shape) != 2 or not is_head:
        missing["logits"] = "the model's output is no vector of logits"
    else:
        hook_points["logits"] = (HookPoint(""),)
    return hook_points, missing

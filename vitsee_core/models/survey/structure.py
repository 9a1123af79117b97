"""The blocks of a model, found from how its modules are nested and called; the same in every
library, whatever modules lie around them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from vitsee_core.models.survey.tracing import Key, Seen, Trace

CONTAINERS = ("blocks", "stages", "layers")
# This many layers in a row make a stack (VGG); fewer are the stem of something else.
MIN_STACK = 4
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# timm's norms with an activation inside derive from these.
_LEAVES = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
NamedModules = Sequence[tuple[str, nn.Module]]  # path, module


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module does one thing: no children, or a norm that carries its
    activation."""
    return isinstance(module, _LEAVES) or not any(module.children())


def has_weights(module: nn.Module) -> bool:
    """Return whether a module, or one below it, has parameters."""
    return next(module.parameters(), None) is not None


def n_layers(module: nn.Module) -> int:
    """Return the number of weight matrices of a module and of all below it."""
    return sum(_has_weight_matrix(child) for child in module.modules())


def join(path: str, name: str) -> str:
    """Return the dotted path of a child."""
    return f"{path}.{name}" if path else name


def find_blocks(model: nn.Module, trace: Trace) -> list[str]:
    """Return the paths of the model's blocks in the order in which they ran.

    The first of these that gives any:

    - what the model itself records as its hidden states (transformers);
    - repeated children of the containers `blocks`, `stages` or `layers`, at the root or in a
      backbone below it;
    - members of the list of one class that ran once each, gave tokens and holds most weights;
    - the modules that follow one another at the root;
    - layers in a plain stack.

    A block gives one activation, with the batch in front, of more than channels.
    """
    finder = _BlockFinder(model, trace)
    blocks = finder.recorded_blocks() or finder.blocks_in_containers()
    blocks = blocks or finder.lone_list()
    blocks = blocks or list(finder.trunk("", model))
    blocks = blocks or list(finder.stack_ends(model, min_layers=1))
    # By when they ended: modules need not be defined in the order in which they run.
    return sorted(blocks, key=lambda path: trace.calls[path][0].ended)


def repeated_blocks(
    model: nn.Module, trace: Trace, blocks: Sequence[str]
) -> dict[str, int]:
    """Return path -> number of calls of modules that ran several times and look like blocks.

    Beside blocks these are members of the same lists, of the same class; in a model without blocks
    all modules of several layers. Modules within one another are named once.
    """
    # (path of the list, class) of the blocks.
    lists_and_classes = set()
    for path in blocks:
        parent = path.rpartition(".")[0]
        lists_and_classes.add((parent, type(model.get_submodule(path))))
    repeated: dict[str, int] = {}
    for path, module in model.named_modules():
        n_calls = len(trace.calls.get(path, ()))
        is_inside = any(path.startswith(f"{outer}.") for outer in repeated)
        parent = path.rpartition(".")[0]
        is_like_block = not blocks or (parent, type(module)) in lists_and_classes
        if n_calls > 1 and is_like_block and not is_inside and n_layers(module) > 1:
            repeated[path] = n_calls
    return repeated


def block_names(blocks: Sequence[str], trace: Trace) -> dict[str, str]:
    """Return path -> name of each block.

    Blocks of a single list that are sequences of tokens, or all compute attention, on one grid, are
    `blocks.N`. Of other paths what all have in common before a list is cut:
    `encoder.layers.0.blocks.1` is `layers.0.blocks.1`.
    """
    if not blocks:
        return {}
    # A plain ViT: one list on one grid has short names, `blocks.0` and on.
    parents = {path.rpartition(".")[0] for path in blocks}
    if len(parents) == 1 and "" not in parents and _are_alike(blocks, trace):
        numbers = _numbers_in_list(blocks, parents.pop(), trace)
        return {path: f"blocks.{n}" for path, n in zip(blocks, numbers, strict=True)}
    words_of_paths = [path.split(".") for path in blocks]
    n_common = 0  # leading words that all paths share; each keeps one word at least
    while len(blocks) > 1:
        words_here = {
            words[n_common] if len(words) > n_common + 1 else None
            for words in words_of_paths
        }
        if len(words_here) > 1 or None in words_here:
            break
        n_common += 1
    are_numbered = n_common > 0 and all(
        words[n_common].isdigit() for words in words_of_paths
    )
    # `layers.0` and `layers.1`, not `0` and `1`.
    n_cut = n_common - 1 if are_numbered else 0  # the list's own name stays
    return {
        path: ".".join(words[n_cut:])
        for path, words in zip(blocks, words_of_paths, strict=True)
    }


def _numbers_in_list(blocks: Sequence[str], parent: str, trace: Trace) -> list[int]:
    """Return the number of each block of one list: its own where members lack one or ran in
    another order, else its position.

    A list that ran in another order, or of which a member ran several times, keeps its own numbers:
    there depth counts the order.
    """
    last_words = [path.rpartition(".")[2] for path in blocks]
    own_numbers = [int(word) for word in last_words if word.isdigit()]
    members = [name for name in trace.calls if name.rpartition(".")[0] == parent]
    ran_once = all(len(trace.calls[name]) == 1 for name in members)
    is_in_order = ran_once and own_numbers == sorted(own_numbers)
    if len(own_numbers) < len(blocks) or is_in_order:
        return list(range(len(blocks)))
    return own_numbers


class _BlockFinder:
    """Finds blocks among the modules of a model that a trace has seen running."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model = model
        self.trace = trace

    def positional_output(self, path: str) -> Seen | None:
        """Return the output of a module that is called once, None unless it has shape
        (batch, ..., ...), three axes or more."""
        seen = self.trace.by_image(self.trace.left(path))
        return seen if seen and len(seen.shape) >= 3 else None

    def recorded_blocks(self) -> list[str]:
        """Return the blocks of the class that a model of transformers names in
        `_can_record_outputs`; a stage of that class stands for its own blocks."""
        for path, module in self.model.named_modules():
            recordable = getattr(module, "_can_record_outputs", None)
            if not isinstance(recordable, dict):
                continue
            recorder = recordable.get("hidden_states")
            block_class = getattr(recorder, "target_class", recorder)
            layer_name = getattr(recorder, "layer_name", None) or ""
            if not isinstance(block_class, type):
                continue
            # By when their outputs were first seen, as the class's instances may lie in
            # several lists.
            keys_and_paths: list[tuple[Key, str]] = []
            for child_path, child in module.named_modules(prefix=path):
                if layer_name not in child_path or not isinstance(child, block_class):
                    continue
                seen = self.positional_output(child_path)
                if seen is not None:
                    keys_and_paths.append((seen.key, child_path))
            blocks: list[str] = []
            for _, child_path in sorted(keys_and_paths):
                child = self.model.get_submodule(child_path)
                blocks.extend(self.expand(child_path, child))
            if keys_and_paths:
                return blocks
        return []

    def blocks_in_containers(self) -> list[str]:
        """Return the blocks in containers of the usual names; where other lists of blocks hold more
        weights (a tower that embeds the patches of a larger model), the members of both."""
        blocks = list(self.named_blocks("", self.model))
        if not blocks:
            return []
        members_elsewhere: list[str] = []
        # Lists that neither hold a known block nor lie within one.
        for members in self.token_lists():
            if not any(
                _one_holds_other(member, path) for member in members for path in blocks
            ):
                members_elsewhere += members
        if self._n_weights(members_elsewhere) > self._n_weights(blocks):
            return [*blocks, *members_elsewhere]
        return blocks

    def token_lists(self) -> Iterator[list[str]]:
        """Yield the members' paths of each list of one class whose members ran once each and gave
        tokens."""
        for path, module in self.model.named_modules():
            members = [join(path, name) for name, _ in module.named_children()]
            # Leaves beside the blocks (an activation in a Sequential) do not count.
            classes = {type(child) for child in module.children() if not is_leaf(child)}
            if not isinstance(module, _LISTS) or len(members) < 2 or len(classes) != 1:
                continue
            outputs = [self.positional_output(member) for member in members]
            # (images, tokens, dim)
            if all(seen is not None and len(seen.shape) == 3 for seen in outputs):
                yield members

    def lone_list(self) -> list[str]:
        """Return the members of the list of `token_lists` that holds most of the model's weights
        and is the only one of its class; [] without one."""
        lists_by_class: dict[type[nn.Module], list[list[str]]] = defaultdict(list)
        for members in self.token_lists():
            modules = [self.model.get_submodule(member) for member in members]
            member_class = next(type(m) for m in modules if not is_leaf(m))
            lists_by_class[member_class].append(members)
        # Most of the weights: decoders and necks have lists of blocks, too.
        half = sum(p.numel() for p in self.model.parameters()) / 2
        for lists in lists_by_class.values():
            if len(lists) == 1 and self._n_weights(lists[0]) > half:
                return lists[0]
        return []

    def _n_weights(self, paths: Iterable[str]) -> int:
        """Return the number of parameters of these modules."""
        modules = [self.model.get_submodule(path) for path in paths]
        return sum(p.numel() for module in modules for p in module.parameters())

    def named_blocks(self, path: str, module: nn.Module) -> Iterator[str]:
        """Yield the blocks in containers of the usual names, at any depth below a module."""
        for name, child in module.named_children():
            child_path = join(path, name)
            if name in CONTAINERS and not is_leaf(child):
                blocks: list[str] = []
                # MNASNet: `layers` is a list of layers and of lists of blocks.
                if self._holds_lists_among_layers(child):
                    blocks = list(self.trunk(child_path, child))
                yield from blocks or self.expand(
                    child_path, child, may_be_stages=name != "blocks"
                )
            elif not is_leaf(child) and not isinstance(child, _LISTS):
                yield from self.named_blocks(child_path, child)

    def trunk(self, path: str, module: nn.Module) -> Iterator[str]:
        """Yield the blocks among a module's composite children: those in lists, else those numbered
        like their siblings, else all of them."""
        children: dict[str, nn.Module] = {}
        # A list that mixes layers and blocks (torchvision's `features`) is looked into;
        # one of layers alone is left to `stack_ends`.
        for name, child in module.named_children():
            is_mixed = isinstance(child, _LISTS) and _is_mixed(child)
            if is_mixed and any(not is_leaf(member) for member in child.children()):
                blocks = list(self.trunk(join(path, name), child))
                if blocks:
                    yield from blocks
                    return
            elif not is_leaf(child) and not is_mixed and has_weights(child):
                children[name] = child

        lists = [
            (join(path, name), child)
            for name, child in children.items()
            if isinstance(child, _LISTS)
        ]
        blocks = list(self._expand_each(lists))
        if blocks:
            yield from blocks
            yield from self._blocks_between(path, children, blocks)
            return

        stems = Counter(_stem(name) for name in children)
        numbered = [
            (join(path, name), child)
            for name, child in children.items()
            if name[-1].isdigit() and stems[_stem(name)] > 1
        ]
        # Plain stacks before the remaining children: VGG's layers lie in one Sequential.
        blocks = list(self._expand_each(numbered)) or list(self.stack_ends(module, path))
        if not blocks:
            composite = [(join(path, name), child) for name, child in children.items()]
            blocks = list(self._expand_each(composite))
        yield from blocks

    def _blocks_between(
        self, path: str, children: Mapping[str, nn.Module], listed: Sequence[str]
    ) -> Iterator[str]:
        """Yield siblings of lists, of a class of their members, that ran between these: the middle
        of a U.

        Args:
            path: the parent's path.
            children: name -> composite child of the parent.
            listed: paths of the lists' blocks.
        """
        classes = {type(self.model.get_submodule(block)) for block in listed}
        # Each ran once: that made it a block.
        ends = [self.trace.calls[block][0].ended for block in listed]
        for name, child in children.items():
            child_path = join(path, name)
            is_in_list = any(_one_holds_other(child_path, block) for block in listed)
            if type(child) not in classes or is_in_list:
                continue
            if self.positional_output(child_path) is None:
                continue
            if min(ends) < self.trace.calls[child_path][0].ended < max(ends):
                yield child_path

    def _expand_each(
        self, modules: NamedModules, may_be_stages: bool = True
    ) -> Iterator[str]:
        """Yield the blocks of siblings; one layer with its norm is not one beside real blocks."""
        of_several_layers = [
            (path, module) for path, module in modules if n_layers(module) > 1
        ]
        for path, module in of_several_layers or modules:
            yield from self.expand(path, module, may_be_stages)

    def expand(
        self, path: str, module: nn.Module, may_be_stages: bool = True
    ) -> Iterator[str]:
        """Yield the blocks that a container, a stage or a block itself stands for.

        may_be_stages: whether the module may still be a stage, whose children are the blocks.
        """
        children = [
            (join(path, name), child)
            for name, child in module.named_children()
            if not is_leaf(child)
        ]
        if isinstance(module, _LISTS) and children and not _is_mixed(module):
            yield from self._expand_each(children, may_be_stages)
            return
        blocks = self._inner_blocks(path, module, may_be_stages)
        if blocks:
            yield from blocks
        elif may_be_stages and self._is_stage(path, module, children):
            yield from self._expand_each(children, may_be_stages=False)
        elif self.positional_output(path):
            yield path
        else:
            yield from self._expand_each(children, may_be_stages)

    def _inner_blocks(
        self, path: str, module: nn.Module, may_be_stages: bool
    ) -> list[str]:
        """Return the blocks of a module's own list `blocks` or `layers`, [] where it has none or
        where the module itself is a block, unless its output is that of the list's last member.

        may_be_stages: whether the module may still be a stage (then it is not taken for a block).
        """
        for name in ("blocks", "layers"):
            inner = getattr(module, name, None)
            if not isinstance(inner, _LISTS) or all(map(is_leaf, inner.children())):
                continue
            inner_path = join(path, name)
            # Where it can be no stage, the module is a block itself, unless it only hands
            # on the output of its list's last member.
            is_block = not may_be_stages and self.positional_output(path) is not None
            if not is_block or self._ends_in_last_member(path, inner_path, inner):
                blocks = list(self.expand(inner_path, inner, may_be_stages=False))
                if blocks:
                    return blocks
        return []

    def stack_ends(
        self, module: nn.Module, path: str = "", min_layers: int = MIN_STACK
    ) -> Iterator[str]:
        """Yield the ends of layers in plain stacks below a module: the last leaf before each next
        layer with a weight matrix.

        min_layers: number of such layers that make a stack.
        """
        for stack_name, stack in module.named_children():
            names = [name for name, _ in stack.named_children()]
            starts_layer = [_has_weight_matrix(child) for child in stack.children()]
            if not isinstance(stack, nn.Sequential) or sum(starts_layer) < min_layers:
                continue
            for i, name in enumerate(names):
                is_end = i + 1 == len(names) or starts_layer[i + 1]
                leaf_path = join(join(path, stack_name), name)
                if is_end and self.positional_output(leaf_path):
                    yield leaf_path

    def _holds_lists_among_layers(self, module: nn.Module) -> bool:
        """Return whether a list of layers has lists of blocks among them (MNASNet)."""
        has_lists = any(isinstance(child, _LISTS) for child in module.children())
        return isinstance(module, _LISTS) and _is_mixed(module) and has_lists

    def _ends_in_last_member(self, path: str, list_path: str, members: nn.Module) -> bool:
        """Return whether a module's output is that of the last member of its list, whose members
        are of one class."""
        last_name, last = list(members.named_children())[-1]
        output = self.positional_output(path)
        last_output = self.positional_output(join(list_path, last_name))
        if output is None or last_output is None or output.key != last_output.key:
            return False
        return all(type(member) is type(last) for member in members.children())

    def _is_stage(self, path: str, module: nn.Module, children: NamedModules) -> bool:
        """Return whether a module's children are one thing again and again, the last one giving the
        result."""
        stems = {_stem(child_path.rpartition(".")[2]) for child_path, _ in children}
        are_numbered = all(child_path[-1].isdigit() for child_path, _ in children)
        if len(stems) != 1 or not are_numbered or _is_mixed(module):
            return False
        # A stage that returns several tensors has no single output: the names decide
        # alone.
        output = self.positional_output(path)
        last_output = self.positional_output(children[-1][0])
        if output is None:
            return True
        return last_output is not None and output.key == last_output.key


def _is_mixed(module: nn.Module) -> bool:
    """Return whether layers are among a module's children: such a list is one block, not a list of
    blocks."""
    return any(is_leaf(child) and has_weights(child) for child in module.children())


def _are_alike(blocks: Sequence[str], trace: Trace) -> bool:
    """Return whether blocks give tensors of one shape, and all give sequences of tokens or all
    compute attention."""
    outputs = [trace.by_image(trace.left(path)) for path in blocks]
    shapes = {seen.shape for seen in outputs if seen is not None}
    if len(shapes) != 1 or None in outputs:
        return False
    (shape,) = shapes
    if len(shape) == 3:
        return True
    # Maps, (images, channels, rows, cols) or channels last: only alike where each
    # attends.
    for path in blocks:
        if not any(f"{module}.".startswith(f"{path}.") for module in trace.events):
            return False
    return True


def _one_holds_other(path: str, other_path: str) -> bool:
    """Return whether two modules are the same, or one lies within the other."""
    if f"{path}.".startswith(f"{other_path}."):
        return True
    return f"{other_path}.".startswith(f"{path}.")


def _stem(name: str) -> str:
    """Return a name without the number at its end."""
    return re.sub(r"\d+$", "", name)


def _has_weight_matrix(module: nn.Module) -> bool:
    """Return whether a module itself has a weight of two axes or more."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim > 1

"""The blocks that each block takes its input from: one chain, or branches that part and join.

Depth counts blocks in the order in which they ran, and rollout multiplies their attention in that
order. In a U-shape a block also takes what a much earlier one gave, and of two towers neither takes
what the other gives; there a number against depth means less than in a chain, which has to be said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vitsee_core.models.survey.tracing import Key, Trace
from vitsee_core.runtime.machine import plural


def block_inputs(trace: Trace, blocks: Sequence[str]) -> list[set[int]]:
    """Return for each block the indices of the blocks whose outputs its arguments are made of; what
    lies behind those blocks does not count.

    blocks: paths in the order in which they ran.
    """
    block_of_output: dict[Key, int] = {}
    for index, path in enumerate(blocks):
        for key in trace.calls[path][0].outputs:
            block_of_output[key] = index
    images = set(trace.calls[""][0].inputs)
    inputs_of_blocks: list[set[int]] = []
    for index, path in enumerate(blocks):
        sources = _nearest_sources(
            trace, block_of_output, keys=trace.calls[path][0].inputs, images=images
        )
        block_indices = sources.blocks
        if not block_indices and not sources.has_images and index:
            # Functions that torch does not show lie between: nothing speaks against a chain.
            block_indices = {index - 1}
        inputs_of_blocks.append(block_indices)
    return inputs_of_blocks


class _Sources(NamedTuple):
    """The blocks that tensors are made of, and whether the images are among their sources without a
    block between."""

    blocks: set[int]
    has_images: bool


def _nearest_sources(
    trace: Trace,
    block_of_output: Mapping[Key, int],
    keys: Sequence[Key],
    images: Collection[Key],
) -> _Sources:
    """Return the nearest blocks behind some tensors.

    Args:
        trace: a forward pass.
        block_of_output: tensor -> index of the block that it is an output of.
        keys: the tensors.
        images: the model's own inputs.
    """
    block_indices: set[int] = set()
    has_images = False
    # Backwards through what each tensor was made of, as far as the first block on each path.
    waiting = list(keys)
    visited = set(waiting)
    while waiting:
        key = waiting.pop()
        has_images = has_images or key in images
        if key in block_of_output:
            block_indices.add(block_of_output[key])
            continue
        terms = trace.made_of.get(key)
        if terms is None:
            serial, version = key
            # A change through a view of its memory is noted at the view alone.
            terms = {(serial, version - 1)} if version else set()
        waiting += terms - visited
        visited |= terms
    return _Sources(block_indices, has_images)


def side_by_side(inputs: Sequence[set[int]]) -> int | None:
    """Return the index of the first block, but for block 0, that takes nothing of the block that
    ran before it; None where there is none, as in a chain and in a U-shape.

    inputs: per block the indices of the blocks that it takes its input from.
    """
    for index, sources in enumerate(inputs):
        if index and index - 1 not in sources:
            return index
    return None


def flow_remark(inputs: Sequence[set[int]], names: Sequence[str]) -> str | None:
    """Return a remark on blocks that are not a chain, None for a chain.

    Args:
        inputs: per block the indices of the blocks that it takes its input from.
        names: the blocks' names.

    >>> remark = flow_remark([set(), {0}, {0, 1}], ["blocks.0", "blocks.1", "blocks.2"])
    >>> remark.partition(";")[0]
    'branches join: blocks.2 takes what blocks.0 and blocks.1 give'
    """
    joining = [index for index, sources in enumerate(inputs) if len(sources) > 1]
    apart = side_by_side(inputs)
    if apart is None and not joining:
        return None
    if joining:
        first = joining[0]
        sources = [names[index] for index in sorted(inputs[first])]
        listed = f"{', '.join(sources[:-1])} and {sources[-1]}"
        n_others = len(joining) - 1
        others = f", and so {plural(n_others, 'more blocks')}" if n_others else ""
        fact = f"branches join: {names[first]} takes what {listed} give{others}"
    else:
        assert apart is not None
        fact = (
            f"branches run side by side: {names[apart]} takes nothing of "
            f"{names[apart - 1]}"
        )
    return (
        f"{fact}; depth is the order in which blocks ran, not a distance along one path"
    )

"""Which blocks a block takes its input from: one chain, or branches that part and join.

Depth counts blocks in the order in which they ran, and rollout multiplies their attention in that
order. In a U-shape a block also takes what a much earlier one gave, and of two towers neither takes
what the other gives; there a number against depth means less than in a chain, which has to be said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vitsee_core.models.survey.tracing import Key, Trace
from vitsee_core.runtime.machine import plural


def block_inputs(trace: Trace, blocks: Sequence[str]) -> list[set[int]]:
    """Return for each block the indices of the blocks whose outputs its arguments are made of, each
    traced back to the nearest block alone. blocks: paths in the order in which they ran."""
    giving = {
        key: index
        for index, path in enumerate(blocks)
        for key in trace.calls[path][0].outputs
    }
    images = set(trace.calls[""][0].inputs)
    found: list[set[int]] = []
    for index, path in enumerate(blocks):
        keys = trace.calls[path][0].inputs
        nearest, from_images = _nearest(trace, giving, keys, images)
        if not nearest and not from_images and index:
            # Functions that torch does not show lie between: nothing speaks against a chain.
            nearest = {index - 1}
        found.append(nearest)
    return found


def _nearest(
    trace: Trace, giving: Mapping[Key, int], keys: Sequence[Key], images: Collection[Key]
) -> tuple[set[int], bool]:
    """The blocks behind these tensors, and whether the images are there without a block between."""
    nearest: set[int] = set()
    from_images = False
    waiting = list(keys)
    seen = set(waiting)
    while waiting:
        key = waiting.pop()
        from_images = from_images or key in images
        if key in giving:
            nearest.add(giving[key])
            continue
        before = trace.made_of.get(key)
        if before is None:
            serial, version = key
            # A change through a view of its memory is noted at the view alone.
            before = {(serial, version - 1)} if version else set()
        waiting += before - seen
        seen |= before
    return nearest, from_images


def side_by_side(inputs: Sequence[set[int]]) -> int | None:
    """Return the first block, but for those at the beginning of all, that takes nothing of the
    block that ran before it; None where there is none, as in a chain and in a U-shape."""
    for index, sources in enumerate(inputs):
        if index and index - 1 not in sources:
            return index
    return None


def flow_remark(inputs: Sequence[set[int]], names: Sequence[str]) -> str | None:
    """Return a remark on blocks that are no chain, None of a chain.

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
        fact = f"branches run side by side: {names[apart]} takes nothing of {names[apart - 1]}"
    return (
        f"{fact}; depth is the order in which blocks ran, not a distance along one path"
    )

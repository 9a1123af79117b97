"""What blocks are called: the same in every library, whatever modules lie around them."""

from __future__ import annotations

from collections.abc import Sequence

from vitsee_core.models.trace import Trace

BLOCKS = "blocks"


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
        return {path: f"{BLOCKS}.{i}" for i, path in enumerate(blocks)}
    parts = [path.split(".") for path in blocks]
    n = 0
    while len(parts) > 1 and all(len(own) > n + 1 and own[n] == parts[0][n] for own in parts):
        n += 1
    listed = n > 0 and all(own[n].isdigit() for own in parts)
    first = n - 1 if listed else 0  # the list's own name stays
    return {path: ".".join(own[first:]) for path, own in zip(blocks, parts, strict=True)}


def _alike(blocks: Sequence[str], trace: Trace) -> bool:
    left = [trace.by_image(trace.left(path)) for path in blocks]
    shapes = {seen.shape for seen in left if seen is not None}
    if len(shapes) != 1 or None in left:
        return False
    (shape,) = shapes
    watched = [f"{module}." for module in trace.events]
    attend = all(any(module.startswith(f"{path}.") for module in watched) for path in blocks)
    return len(shape) == 3 or attend

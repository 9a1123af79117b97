"""Which blocks have one attention from every token to every token, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.sites import AttentionBlock
from vitsee_core.models.sites.block_sums import heads_hook_point
from vitsee_core.models.survey import Reader
from vitsee_core.models.survey.geometry import in_raster_order
from vitsee_core.models.survey.tracing import AttentionSeen
from vitsee_stores.layout import TokenLayout

NO_ATTENTION = "no block has a softmax over tokens"


class AttentionIn(NamedTuple):
    """An attention call, and the path of the module inside which it is computed."""

    module: str
    event: AttentionSeen


@dataclass
class Attention:
    """The token-to-token attention of a model.

    Attributes:
        blocks: the attention that can be captured.
        modules: attention -> path of the module inside which it is computed.
        heads: attention -> where the heads' outputs go next, if that was found.
        left_out: "NAME attention" -> why the block has no such attention.
        refusal: why no block has; None if one has.
    """

    blocks: list[AttentionBlock] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    heads: dict[str, HookPoint] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


def attention_blocks(
    read: Reader, names: Mapping[str, str], demoted: Mapping[str, Sequence[str]]
) -> Attention:
    """Return the attention of every block, or why a block has none that can be captured.

    Args:
        read: a survey of the model.
        names: path of a block -> its name.
        demoted: "NAME attention" -> why its attention was disproved.
    """
    attention = Attention()
    for path, index in read.block_index.items():
        # Also of modules inside the block, whatever they are called.
        calls = [
            AttentionIn(module, event)
            for module, events in read.trace.events.items()
            if module == path or module.startswith(f"{path}.")
            for event in events
        ]
        if not calls:
            continue
        layouts = _raster_layouts(read, path)
        calls_by_name = _split_time_and_space(read, names[path], calls)
        # NAME, or NAME.time and NAME.space.
        for name, calls_of_name in calls_by_name.items():
            disproved = demoted.get(f"{name} attention")
            if disproved:
                reason: str | None = disproved[-1]
            else:
                reason = _capture_refusal(read, calls_of_name, layouts)
            if reason:
                attention.left_out[f"{name} attention"] = reason
                continue
            module, event = calls_of_name[0]
            attention.blocks.append(
                AttentionBlock(
                    name,
                    index=index,
                    n_heads=event.query[1],
                    # _capture_refusal has made sure that there is one.
                    layout=next(x for x in layouts if x.n_tokens == event.n_keys),
                    window=event.window,
                )
            )
            attention.modules[name] = module
            hook_point = _heads_hook_point(read, path, module, event)
            if hook_point:
                attention.heads[name] = hook_point
    if not attention.blocks:
        # Each reason once, in the order of the blocks.
        reasons = list(dict.fromkeys(attention.left_out.values()))
        attention.refusal = "; ".join(reasons[:2]) if reasons else NO_ATTENTION
    return attention


def rollout_refusal(attention: Attention, n_blocks: int) -> str | None:
    """Return why attention cannot be multiplied from the last block to the first, None if it can.
    n_blocks: the model's blocks."""
    if attention.refusal:
        return attention.refusal
    windows = {block.window for block in attention.blocks}
    # Windows of clips have three sides.
    if any(window is not None and len(window) == 3 for window in windows):
        if any(len(names) > 1 for names in _names_by_index(attention).values()):
            return "attention is divided between time and space"
        return _within_frames(attention)
    if len({block.layout for block in attention.blocks}) > 1:
        return "attention lies on several grids"
    if len(windows) > 1:
        return "attention is within windows in some blocks, and over all tokens in others"
    indices = [block.index for block in attention.blocks]
    # Blocks without any attention may come before (a convolutional stem), but not
    # between.
    if attention.left_out or indices != list(range(indices[0], n_blocks)):
        return "not every block has token-to-token attention"
    return None


def _names_by_index(attention: Attention) -> dict[int, list[str]]:
    """Number of a block -> the names of its attention, two where it is divided."""
    names: dict[int, list[str]] = {}
    for block in attention.blocks:
        names.setdefault(block.index, []).append(block.name)
    return names


def _within_frames(attention: Attention) -> str:
    """Return why there is no rollout of clips or views where attention is within one of them in
    some blocks: what the first block of each kind sees."""
    seen: dict[str, str] = {}
    for block in attention.blocks:
        tokens = "all tokens"
        if block.window is not None:
            tokens = f"windows of {' x '.join(map(str, block.window))} cells"
        seen.setdefault(tokens, block.name)
    kinds = "; ".join(f"{name} attends to {tokens}" for tokens, name in seen.items())
    return f"{kinds}; rollout is stored where all blocks attend to all tokens"


def _split_time_and_space(
    read: Reader, name: str, calls: list[AttentionIn]
) -> dict[str, list[AttentionIn]]:
    """Return the attention calls of a block by name: all under the block's name, or for clips with
    divided attention one over time and one within frames (Bertasius et al. 2021)."""
    by_kind: dict[str, list[AttentionIn]] = {}
    for call in calls:  # in the order of the forward pass
        window = call.event.window
        if window is not None and len(window) == 3:
            # In a window that is one frame long, tokens of the same time see each other.
            kind = "space" if window[0] == 1 else "time"
            by_kind.setdefault(f"{name}.{kind}", []).append(call)
    # Exactly two calls, one of each kind.
    is_divided = len(calls) == len(by_kind) == 2
    if read.geometry.frames is None or not is_divided:
        return {name: calls}
    return by_kind


def _raster_layouts(read: Reader, path: str) -> list[TokenLayout]:
    """Return the layouts of a block's input and output in which tokens lie row by row; for clips
    also that of the grid alone, as attention over time leaves prefix tokens out."""
    trace = read.trace
    layouts = []
    for entering in (True, False):
        seen = trace.by_image(trace.entered(path) if entering else trace.left(path))
        if seen is None or len(seen.shape) <= 2:
            continue
        view = read.token_view(path, seen, entering)
        if view.layout and view.layout.grid and view.form != "unrolled":
            layouts.append(view.layout)
    if read.geometry.frames is not None:
        layouts += [replace(layout, prefix=()) for layout in layouts if layout.prefix]
    return layouts


def _capture_refusal(
    read: Reader, calls: list[AttentionIn], layouts: list[TokenLayout]
) -> str | None:
    """Return why the attention of a block is not one from every token to every token; None if it
    is.

    layouts: those of the block's input and output.
    """
    n_images = read.trace.n_images
    event = calls[0].event
    if len(calls) > 1:
        return f"{len(calls)} attention calls in one block"
    if event.mixed and not event.over_last:
        return (
            "the softmax is not over the last axis of its argument, and the values are "
            "not multiplied with it along the axis that it is over"
        )
    if event.mixed:
        return "the values are not multiplied by the softmax as it is (heads mixed after it, say)"
    if event.within is not None:
        return f"attention within {event.within}"
    if event.query[0] < n_images:
        return "one attention over the tokens of several images"
    # Reshaped (images x windows or heads, ...): the number per image tells which.
    if event.query[0] != n_images:
        n_per_image = event.query[0] / n_images  # windows, or heads
        n_cells = min((layout.n_body for layout in layouts), default=0)
        if len(event.query) == 3:
            _, n_second, n_queries = event.query
            # Windows of padded maps have a little more queries than tokens, heads a multiple.
            if n_cells <= n_per_image * n_queries < 4 * n_cells:
                n_windows = n_per_image
                if n_second * n_queries == n_cells != n_per_image * n_queries:
                    # HaloNet has the heads in the batch dimension and the windows in the next.
                    n_windows = n_second
                return f"attention within windows ({n_windows:g} per image)"
        return (
            f"{n_per_image:g} attentions per image in the batch dimension (heads, or "
            "windows)"
        )
    if event.value is None or len(event.query) != 3:
        return f"attention over {len(event.query) + 1} dimensions, not image, head, query, key"
    # Keys of fewer tokens than the queries, as where PVT reduces them.
    if event.query[2] != event.n_keys:
        return f"pooled tokens: {event.query[2]} queries, {event.n_keys} keys"
    layout = next((x for x in layouts if x.n_tokens == event.n_keys), None)
    if layout is None:
        sizes = " or ".join(dict.fromkeys(str(x.n_tokens) for x in layouts))
        sizes = sizes or "unordered"
        return f"attention over {event.n_keys} entries, but the block has {sizes} tokens"
    # By the values' response to changed corners: shapes alone do not show the order.
    if event.value.shape[1] != event.n_keys or not in_raster_order(event.value, layout):
        return "the tokens do not lie row by row inside the attention"
    return None


def _heads_hook_point(
    read: Reader, path: str, module: str, event: AttentionSeen
) -> HookPoint | None:
    """Return where the heads' outputs go side by side: timm's modules by their names, others by
    when they are entered; None where that is not found."""
    assert event.value is not None
    for name in ("norm", "proj", "attn_out_proj"):
        hook_point = HookPoint(f"{module}.{name}" if module else name, "in")
        seen = read.seen(hook_point) if hook_point.module in read.modules else None
        # Made after the values: TinyViT's norm is before its queries, keys and values.
        if seen and seen.shape == event.value.shape and seen.key > event.value.key:
            return hook_point
    return heads_hook_point(read.model, read.trace, path, event.value)

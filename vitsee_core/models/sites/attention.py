"""Which blocks have one attention from every token to every token, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.sites import AttentionBlock
from vitsee_core.models.sites.block_sums import heads_hook_point
from vitsee_core.models.survey import Reader
from vitsee_core.models.survey.geometry import in_raster_order
from vitsee_core.models.survey.tracing import AttentionSeen
from vitsee_stores.layout import TokenLayout

NO_ATTENTION = "no block has a softmax over tokens"


@dataclass
class Attention:
    """blocks: those with token-to-token attention; modules: block -> module inside which it is
    computed; heads: block -> where the heads' outputs go next, if that was found; left_out: "NAME
    attention" -> why it has no such attention; refusal: why no block has."""

    blocks: list[AttentionBlock] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    heads: dict[str, HookPoint] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


def attention_blocks(
    read: Reader, names: Mapping[str, str], demoted: Mapping[str, Sequence[str]]
) -> Attention:
    """The attention of every block, or why it has none that can be captured. names: of the blocks
    by their paths. demoted: "NAME attention" -> why what was found there before was disproved."""
    found = Attention()
    for path, index in read.block_index.items():
        name = names[path]
        met = [
            (module, event)
            for module, events in read.trace.events.items()
            if module == path or module.startswith(f"{path}.")
            for event in events
        ]
        if not met:
            continue
        layouts = _layouts(read, path)
        for own, events in _divided(read, name, met):
            disproved = demoted.get(f"{own} attention")
            reason = disproved[-1] if disproved else _refusal(read, events, layouts)
            if reason:
                found.left_out[f"{own} attention"] = reason
                continue
            module, event = events[0]
            layout = next(x for x in layouts if x.n_tokens == event.n_keys)
            found.blocks.append(
                AttentionBlock(own, index, event.query[1], layout, event.window)
            )
            found.modules[own] = module
            hook_point = _heads_hook_point(read, path, module, event)
            if hook_point:
                found.heads[own] = hook_point
    if not found.blocks:
        reasons = list(dict.fromkeys(found.left_out.values()))
        found.refusal = "; ".join(reasons[:2]) if reasons else NO_ATTENTION
    return found


def rollout_refusal(attention: Attention, n_blocks: int) -> str | None:
    """Why attention cannot be multiplied from the last block to the first, None if it can."""
    if attention.refusal:
        return attention.refusal
    windows = {block.window for block in attention.blocks}
    if any(window is not None and len(window) == 3 for window in windows):
        return "attention is divided between time and space"
    if len({block.layout for block in attention.blocks}) > 1:
        return "attention lies on several grids"
    if len(windows) > 1:
        return "attention is within windows in some blocks, and over all tokens in others"
    indices = [block.index for block in attention.blocks]
    if attention.left_out or indices != list(range(indices[0], n_blocks)):
        return "not every block has token-to-token attention"
    return None


def _divided(
    read: Reader, name: str, met: list[tuple[str, AttentionSeen]]
) -> Iterator[tuple[str, list[tuple[str, AttentionSeen]]]]:
    """The attentions of a block by name: one, or of clips one over time and one within frames."""
    kinds = {"time": 0, "space": 0}
    for _, event in met:
        if event.window is not None and len(event.window) == 3:
            kinds["space" if event.window[0] == 1 else "time"] += 1
    if read.geometry.frames is None or len(met) != 2 or set(kinds.values()) != {1}:
        yield name, met
        return
    for module, event in met:
        assert event.window is not None
        yield f"{name}.{'space' if event.window[0] == 1 else 'time'}", [(module, event)]


def _layouts(read: Reader, path: str) -> list[TokenLayout]:
    """Layouts of a block's input and output in which tokens lie row by row; of clips also that of
    the grid alone, where attention over time leaves prefix tokens out."""
    trace = read.trace
    found = []
    for call, entering in ((trace.entered(path), True), (trace.left(path), False)):
        seen = trace.by_image(call)
        view = (
            read.token_view(path, seen, entering)
            if seen and len(seen.shape) > 2
            else None
        )
        if view and view.layout and view.layout.grid and view.form != "unrolled":
            found.append(view.layout)
    if read.geometry.frames is not None:
        found += [replace(layout, prefix=()) for layout in found if layout.prefix]
    return found


def _refusal(
    read: Reader, met: list[tuple[str, AttentionSeen]], layouts: list[TokenLayout]
) -> str | None:
    n_images = read.trace.n_images
    event = met[0][1]
    if len(met) > 1:
        return f"{len(met)} attention calls in one block"
    if event.mixed:
        return "the values are not multiplied by the softmax as it is (heads mixed after it, say)"
    if event.within is not None:
        return f"attention within {event.within}"
    if event.query[0] < n_images:
        return "one attention over the tokens of several images"
    if event.query[0] != n_images:
        share = event.query[0] / n_images
        tokens = min((layout.n_body for layout in layouts), default=0)
        # Of padded maps a little more than the tokens, of heads a multiple.
        if len(event.query) == 3 and tokens <= share * event.query[2] < 4 * tokens:
            # HaloNet has the heads in the batch dimension and the windows in the next.
            by_heads = event.query[1] * event.query[2] == tokens != share * event.query[2]
            windows = event.query[1] if by_heads else share
            return f"attention within windows ({windows:g} per image)"
        return (
            f"{share:g} attentions per image in the batch dimension (heads, or windows)"
        )
    if event.value is None or len(event.query) != 3:
        return f"attention over {len(event.query) + 1} dimensions, not image, head, query, key"
    if event.query[2] != event.n_keys:
        return f"pooled tokens: {event.query[2]} queries, {event.n_keys} keys"
    layout = next((x for x in layouts if x.n_tokens == event.n_keys), None)
    if layout is None:
        sizes = (
            " or ".join(dict.fromkeys(str(x.n_tokens) for x in layouts)) or "unordered"
        )
        return f"attention over {event.n_keys} entries, but the block has {sizes} tokens"
    if event.value.shape[1] != event.n_keys or not in_raster_order(event.value, layout):
        return "the tokens do not lie row by row inside the attention"
    return None


def _heads_hook_point(
    read: Reader, path: str, module: str, event: AttentionSeen
) -> HookPoint | None:
    """The module that the heads' outputs enter side by side: timm's by its name, others by when
    they are entered."""
    assert event.value is not None
    for name in ("norm", "proj", "attn_out_proj"):
        hook_point = HookPoint(f"{module}.{name}" if module else name, "in")
        seen = read.seen(hook_point) if hook_point.module in read.modules else None
        # Made after the values: TinyViT's norm is before its queries, keys and values.
        if seen and seen.shape == event.value.shape and seen.key > event.value.key:
            return hook_point
    return heads_hook_point(read.model, read.trace, path, event.value)

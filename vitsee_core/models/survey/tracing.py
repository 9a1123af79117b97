"""One forward pass with a hook on every module: its calls, their inputs and outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.attention_watch import AttentionEvent, AttentionWatch
from vitsee_core.models.hook_points import (
    SCALED_SUMS,
    SUMS,
    ModelError,
    hooked,
    input_tensor,
    output_tensor,
    plain,
    tensors_in,
)
from vitsee_core.models.tokens.clip_order import ClipCalls, ClipOrder
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.packed_order import JoinedCalls, Order, Place

N_CORNERS = 4
_OF_CODE = (
    AttributeError,
    KeyError,
    NameError,
    TypeError,
)  # whatever the size of the images
Key = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """The input or output of a call: its identity, its shape, and its response to local changes.

    key: equal for two exactly if they are the same tensor, unchanged in between.
    shape: the batch first. turned: whether the tensor itself has it second, behind its tokens.
    response: for each dimension after the first, (corners, length): how strongly each index
    responds when one corner of the image changes.
    grid: of a tensor whose order of tokens was found (packed images, clips): rows and columns of
    its cells, of clips times before these. n_prefix: its prefix tokens.
    """

    key: Key
    shape: tuple[int, ...]
    response: tuple[Tensor, ...] = ()
    turned: bool = False
    grid: tuple[int, ...] | None = None
    n_prefix: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module; None where input or output is no single tensor.

    began, ended: how many modules had been entered or left before. inputs, outputs: the keys of all
    tensors among its arguments and results.
    """

    entered: Seen | None
    left: Seen | None
    left_type: str
    began: int = 0
    ended: int = 0
    inputs: tuple[Key, ...] = ()
    outputs: tuple[Key, ...] = ()


@dataclass
class AttentionSeen(AttentionEvent):
    """An attention event without its tensors; value: (images, keys, heads x head dim), None where
    the attention has not the four dimensions of plain attention."""

    value: Seen | None = None


@dataclass
class Trace:
    """All calls by module name, the attention events by module name, and the images used.

    sums: tensor -> the two tensors of its own shape that were added for it. made_of: tensor -> the
    tensors that the functions that gave or changed it were called with. orders: of the tokens of
    packed images and of clips, by place.
    """

    n_images: int
    image: tuple[int, int]
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    events: dict[str, list[AttentionSeen]] = field(
        default_factory=lambda: defaultdict(list)
    )
    sums: dict[Key, tuple[Key, Key]] = field(default_factory=dict)
    made_of: dict[Key, set[Key]] = field(default_factory=lambda: defaultdict(set))
    orders: Mapping[Place, Order | ClipOrder] = field(default_factory=dict)

    def once(self, name: str) -> Call | None:
        """The call of a module that is called exactly once."""
        calls = self.calls.get(name, ())
        return calls[0] if len(calls) == 1 else None

    def entered(self, name: str) -> Seen | None:
        """The input of a module that is called exactly once."""
        call = self.once(name)
        return call.entered if call else None

    def left(self, name: str) -> Seen | None:
        """The output of a module that is called exactly once."""
        call = self.once(name)
        return call.left if call else None

    def turned(self) -> frozenset[tuple[str, bool]]:
        """Modules, and whether their input (or their output), whose tensors have tokens before
        images."""
        return frozenset(
            (name, entering)
            for name, calls in self.calls.items()
            for call in calls
            for entering, seen in ((True, call.entered), (False, call.left))
            if seen and seen.turned
        )

    def by_image(self, seen: Seen | None) -> Seen | None:
        """The tensor itself if its first dimension is the batch."""
        if seen and seen.shape and seen.shape[0] == self.n_images:
            return seen
        return None


def probe_images(
    size: tuple[int, int, int], corners: bool, frames: int | None = None
) -> Tensor:
    """Two random images (2, channels, rows, cols), or clips of so many frames (2, frames, ...);
    with `corners` also a copy of the first image for each corner, with that quadrant drawn anew:
    (6, ...)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(
        (2, *(() if frames is None else (frames,)), *size), generator=generator
    )
    if not corners:
        return images
    rows = size[1] // 2
    cols = size[2] // 2
    changed = images[:1].repeat(N_CORNERS, 1, 1, 1)
    for k in range(N_CORNERS):
        top = slice(0, rows) if k < 2 else slice(rows, None)
        left = slice(0, cols) if k % 2 == 0 else slice(cols, None)
        fresh = torch.randn(changed[k, :, top, left].shape, generator=generator)
        changed[k, :, top, left] = fresh
    return torch.cat([images, changed])


class _Entrance(NamedTuple):
    """A module's input, how many modules had been entered or left before, and the keys of all
    tensors among its arguments."""

    seen: Seen | None
    began: int
    keys: tuple[Key, ...]


class _Recorder:
    def __init__(self, trace: Trace, responses: bool, module: nn.Module) -> None:
        self.trace = trace
        self.responses = responses
        # Only around these is a tensor of (tokens, images, dim) expected.
        self.sequences = any(
            isinstance(m, nn.MultiheadAttention) for m in module.modules()
        )
        self.of_clips = any(isinstance(one, ClipOrder) for one in trace.orders.values())
        self.mark = object()
        self.serial = 0
        self.n_passages = 0
        self.stack: list[str] = []
        self.inputs: list[_Entrance] = []
        self.joining: dict[str, JoinedCalls | ClipCalls] = {}

    def key(self, x: Tensor) -> Key:
        """The tensor's identity in its present state."""
        # An attribute, not id(): ids are reused once a tensor is freed. Parameters keep theirs from
        # one trace to the next, and so the attribute says which trace gave it.
        trace_mark, number = getattr(x, "_vitsee_serial", (None, 0))
        if trace_mark is not self.mark:
            self.serial += 1
            number = self.serial
            x._vitsee_serial = self.mark, number  # type: ignore[attr-defined]
        return number, 0 if x.is_inference() else x._version

    def keys(self, value: Any) -> tuple[Key, ...]:
        """The identities of all tensors in a value."""
        return tuple(self.key(x) for x in tensors_in(value))

    def see(self, x: Tensor | None, place: Place | None = None) -> Seen | None:
        if x is None:
            return None
        key = self.key(x)
        order = None if place is None else self.trace.orders.get(place)
        x = order.to_grid_order(x) if isinstance(order, Order) else x
        turned = (
            self.sequences and x.ndim == 3 and x.shape[1] == self.trace.n_images != len(x)
        )
        x = x.transpose(0, 1) if turned else x
        x = order.to_grid_order(x) if isinstance(order, ClipOrder) else x
        response: tuple[Tensor, ...] = ()
        wanted = self.responses and x.ndim in (3, 4) and x.is_floating_point()
        if wanted and len(x) == self.trace.n_images:
            change = (x[2 : 2 + N_CORNERS].float() - x[:1].float()).square()
            axes = range(1, change.ndim)
            response = tuple(
                change.sum(tuple(a for a in axes if a != axis)) for axis in axes
            )
        own = () if order is None else (order.grid, order.n_prefix)
        return Seen(key, tuple(x.shape), response, turned, *own)

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(name)
        entered = self.see(input_tensor(args, kwargs), (name, True))
        keys = self.keys([args, kwargs])
        self.inputs.append(_Entrance(entered, began=self.n_passages, keys=keys))
        self.n_passages += 1

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        self.stack.pop()
        for event in self.joining.pop(name).events if name in self.joining else ():
            self.note(name, event)
        left = self.see(output_tensor(module, output, self.trace.n_images), (name, False))
        entrance = self.inputs.pop()
        call = Call(
            entrance.seen,
            left,
            type(output).__name__,
            began=entrance.began,
            ended=self.n_passages,
            inputs=entrance.keys,
            outputs=self.keys(output),
        )
        self.n_passages += 1
        self.trace.calls[name].append(call)

    def computed(self, terms: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """The result of a function of these tensors; noted is what it is made of, and what it
        changed in place."""
        before = [self.key(x) for x in terms]
        result = call()
        after = [self.key(x) for x in terms]
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        for key in (*changed, *self.keys(result)):
            self.trace.made_of[key].update(known for known in before if known != key)
        return result

    def added(self, terms: list[Tensor], add: Callable[[], Tensor]) -> Tensor:
        """The sum of two tensors of one shape, noted; of one and a product that is no tensor, with
        an identity in its place that no other has."""
        seen = [self.see(plain(x)) for x in terms]
        result = add()
        total = self.see(plain(result))
        if total is None or any(x is None or _bare(x) != _bare(total) for x in seen):
            return result
        keys = [x.key for x in seen if x is not None]
        if len(keys) == 1:
            self.serial += 1
            keys.append((self.serial, 0))
        self.trace.sums[total.key] = keys[0], keys[1]
        return result

    def event(self, event: AttentionEvent) -> None:
        name = self.stack[-1] if self.stack else ""
        order = self.trace.orders.get((name, True))
        if self.of_clips and order is None:
            # Softmax as a module of its own: the attention is that of the module around it.
            around = [
                one for one in reversed(self.stack) if (one, True) in self.trace.orders
            ]
            name = around[0] if around else name
            order = self.trace.orders.get((name, True))
        joined: AttentionEvent | None = event
        if order is not None:
            calls = self.joining.setdefault(name, order.calls(self.trace.n_images))
            joined = calls.add(event)
        if joined is not None:
            self.note(name, joined)

    def note(self, name: str, event: AttentionEvent) -> None:
        value = (
            self.see(event.call.value.transpose(1, 2).flatten(2)) if event.call else None
        )
        met = AttentionSeen(**{**vars(event), "call": None}, value=value)
        self.trace.events[name].append(met)


def _bare(seen: Seen) -> tuple[int, ...]:
    """A tensor's shape without axes of length 1 in front, which packed tokens get and lose."""
    first = next((i for i, n in enumerate(seen.shape) if n > 1), 0)
    return seen.shape[first:]


class _FunctionWatch(TorchFunctionMode):
    """Tells a recorder which tensors are made of which, and which are added."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        terms = [x for x in args if isinstance(x, Tensor)]
        if func in SCALED_SUMS and len(terms) == 3:
            call = partial(self.recorder.added, terms[:1], call)
        elif func in SUMS and len(terms) == 2 and not kwargs:
            call = partial(self.recorder.added, terms, call)
        activations = [
            x for x in tensors_in([args, kwargs]) if not isinstance(x, nn.Parameter)
        ]
        if activations:
            return self.recorder.computed(activations, call)
        return call()


def trace(
    module: nn.Module,
    size: tuple[int, int, int],
    corners: bool,
    orders: Mapping[Place, Order | ClipOrder] | None = None,
) -> Trace:
    """Run the model once on random images of this size, or clips of them, and record every call;
    tensors with an order as their `orders` lay them.

    Only shapes and identities of activations are kept, so memory is that of the plain forward
    pass.

    Raises:
        ModelError: the model does not take images of this size.
    """
    images = probe_images(size, corners, frames_of(module))
    record = Trace(len(images), size[1:], orders=orders or {})
    recorder = _Recorder(record, corners, module)
    device = next(iter(module.parameters()), images).device
    # no_grad, not inference_mode: in-place changes are known by version counters only.
    sums = _FunctionWatch(recorder)
    watch = AttentionWatch(recorder.event)

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        recorder.enter(name, args, kwargs)
        watch.depth += 1

    def leave(name: str, child: nn.Module, output: Any) -> None:
        if any(child.children()):
            # A leaf (the softmax itself, its dropout) is left before the product comes.
            watch.flush(watch.depth)
        watch.depth -= 1
        recorder.leave(name, child, output)

    hooks = hooked(module, enter, leave)
    with torch.inference_mode(False), torch.no_grad(), hooks, sums, watch:
        try:
            module(images.to(device))
        except _OF_CODE as error:
            text = " ".join(str(error).split()).rstrip(".")
            raise ModelError(
                f"the model's forward pass raises {type(error).__name__}: {text}; "
                "expected a module that takes a batch of images alone"
            ) from error
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split()).rstrip(".")
            where = recorder.stack[-1] if recorder.stack else ""
            kind = type(module.get_submodule(where)).__name__
            text = text or f"{where or 'the model itself'} ({kind}) refuses its input"
            raise ModelError(
                f"the model does not run on images of {size[1]} x {size[2]} pixels: {text}; "
                "expected a size that it takes: try another --img-size"
            ) from error
    return record

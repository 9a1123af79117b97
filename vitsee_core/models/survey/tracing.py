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
    ModuleSide,
    hooked,
    input_tensor,
    output_tensor,
    plain,
    tensors_in,
)
from vitsee_core.models.tokens.clip_order import ClipCalls, ClipOrder
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.packed_order import JoinedCalls, Order

N_CORNERS = 4
# Errors of a model's code, which another size of the images would not mend.
_CODE_ERRORS = (AttributeError, KeyError, NameError, TypeError)
Key = tuple[int, int]  # of a tensor: serial number, version


@dataclass(frozen=True)
class Seen:
    """The input or output of a call: its identity, its shape, and its response to local changes.

    Attributes:
        key: equal for two exactly if they are the same tensor, unchanged in between.
        shape: the shape with the batch first.
        response: for each dimension after the first, (corners, length): how strongly each index
            responds when one corner of the image changes.
        turned: whether the tensor itself has the batch second, behind its tokens.
        grid: (rows, cols) or for clips (times, rows, cols) of the cells of a tensor whose order of
            tokens was found (packed images, clips); None for others.
        n_prefix: prefix tokens of such a tensor.
    """

    key: Key
    shape: tuple[int, ...]
    response: tuple[Tensor, ...] = ()
    turned: bool = False
    grid: tuple[int, ...] | None = None
    n_prefix: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        entered: its input; None where that is not a single tensor.
        left: its output; None where that is not a single tensor.
        left_type: the Python type of the output.
        began: how many modules had been entered or left before the call.
        ended: how many had been when it was over.
        inputs: the keys of all tensors among its arguments.
        outputs: the keys of all tensors among its results.
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
    """An attention event without its tensors.

    Attributes:
        value: the values, (images, keys, heads x head dim); None where the attention does not have
            the four dimensions of plain attention.
    """

    value: Seen | None = None


@dataclass
class Trace:
    """The record of one forward pass.

    Attributes:
        n_images: images, or clips, of the batch.
        image: rows and columns of an image in pixels.
        calls: module -> its calls.
        events: module -> its attention.
        sums: tensor -> the two tensors of its shape whose sum it is.
        made_of: tensor -> the arguments of the functions that returned or changed it.
        orders: module side -> the order of the tokens of packed images and of clips there.
    """

    n_images: int
    image: tuple[int, int]
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    events: dict[str, list[AttentionSeen]] = field(
        default_factory=lambda: defaultdict(list)
    )
    sums: dict[Key, tuple[Key, Key]] = field(default_factory=dict)
    made_of: dict[Key, set[Key]] = field(default_factory=lambda: defaultdict(set))
    orders: Mapping[ModuleSide, Order | ClipOrder] = field(default_factory=dict)

    def once(self, name: str) -> Call | None:
        """Return the call of a module that is called exactly once, None for other modules."""
        calls = self.calls.get(name, ())
        return calls[0] if len(calls) == 1 else None

    def entered(self, name: str) -> Seen | None:
        """Return the input of a module that is called exactly once, None for other modules."""
        call = self.once(name)
        return call.entered if call else None

    def left(self, name: str) -> Seen | None:
        """Return the output of a module that is called exactly once, None for other modules."""
        call = self.once(name)
        return call.left if call else None

    def turned(self) -> frozenset[ModuleSide]:
        """Return the module sides whose tensors have tokens before images."""
        sides = set()
        for name, calls in self.calls.items():
            for call in calls:
                if call.entered and call.entered.turned:
                    sides.add(ModuleSide(name, is_input=True))
                if call.left and call.left.turned:
                    sides.add(ModuleSide(name, is_input=False))
        return frozenset(sides)

    def by_image(self, seen: Seen | None) -> Seen | None:
        """Return the tensor if its first dimension is the batch, else None."""
        if seen and seen.shape and seen.shape[0] == self.n_images:
            return seen
        return None


def probe_images(
    size: tuple[int, int, int], corners: bool, frames: int | None = None
) -> Tensor:
    """Return two random images, (2, channels, rows, cols), or clips, (2, frames, ...).

    Args:
        size: (channels, rows, cols).
        corners: whether four more images follow, (6, ...): copies of the first, each with another
            quadrant drawn anew.
        frames: frames of a clip; None for images.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, *size) if frames is None else (2, frames, *size)
    images = torch.randn(shape, generator=generator)
    if not corners:
        return images
    middle_row = size[1] // 2
    middle_col = size[2] // 2
    halves_of_rows = (slice(0, middle_row), slice(middle_row, None))
    halves_of_cols = (slice(0, middle_col), slice(middle_col, None))
    changed = images[:1].repeat(N_CORNERS, 1, 1, 1)
    for corner in range(N_CORNERS):
        rows = halves_of_rows[corner // 2]
        cols = halves_of_cols[corner % 2]
        quadrant = changed[corner, :, rows, cols]
        quadrant[:] = torch.randn(quadrant.shape, generator=generator)
    return torch.cat([images, changed])


class _Entrance(NamedTuple):
    """A module's input, how many modules had been entered or left before, and the keys of all
    tensors among its arguments."""

    seen: Seen | None
    began: int
    keys: tuple[Key, ...]


class _Recorder:
    """Writes a trace while the model runs: hooks and modes call its methods."""

    def __init__(self, trace: Trace, responses: bool, module: nn.Module) -> None:
        self.trace = trace
        self.responses = responses
        # Only around these is a tensor of (tokens, images, dim) expected.
        self.sequences = any(
            isinstance(m, nn.MultiheadAttention) for m in module.modules()
        )
        self.is_of_clips = any(
            isinstance(order, ClipOrder) for order in trace.orders.values()
        )
        self.mark = object()  # says that a tensor's number is of this trace
        self.serial = 0  # the last number that a tensor was given
        self.n_passages = 0  # modules entered or left
        self.stack: list[str] = []  # names of the modules that are running
        self.inputs: list[_Entrance] = []  # one for each of them
        # Module -> calls of its attention that are to be joined.
        self.joining: dict[str, JoinedCalls | ClipCalls] = {}

    def key(self, x: Tensor) -> Key:
        """Return the tensor's identity in its present state: a number, and its version."""
        # An attribute, not id(): ids are reused once a tensor is freed. Parameters keep theirs from
        # one trace to the next, and so the attribute says which trace gave it.
        trace_mark, number = getattr(x, "_vitsee_serial", (None, 0))
        if trace_mark is not self.mark:
            self.serial += 1
            number = self.serial
            x._vitsee_serial = self.mark, number  # type: ignore[attr-defined]
        return number, 0 if x.is_inference() else x._version

    def keys(self, value: Any) -> tuple[Key, ...]:
        """Return the identities of all tensors in a value."""
        return tuple(self.key(x) for x in tensors_in(value))

    def see(self, x: Tensor | None, side: ModuleSide | None = None) -> Seen | None:
        """Return what is kept of a tensor, in grid order where the order at the side is known."""
        if x is None:
            return None
        key = self.key(x)
        order = None if side is None else self.trace.orders.get(side)
        # Packed tokens get their batch axis before, clips have theirs in front after turning.
        if isinstance(order, Order):
            x = order.to_grid_order(x)
        turned = (
            self.sequences and x.ndim == 3 and x.shape[1] == self.trace.n_images != len(x)
        )
        if turned:
            x = x.transpose(0, 1)
        if isinstance(order, ClipOrder):
            x = order.to_grid_order(x)
        response: tuple[Tensor, ...] = ()
        may_respond = self.responses and x.ndim in (3, 4) and x.is_floating_point()
        if may_respond and len(x) == self.trace.n_images:
            response = _response_by_axis(x)
        return Seen(
            key,
            shape=tuple(x.shape),
            response=response,
            turned=turned,
            grid=None if order is None else order.grid,
            n_prefix=0 if order is None else order.n_prefix,
        )

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the input of a module that is called."""
        self.stack.append(name)
        entered = self.see(input_tensor(args, kwargs), ModuleSide(name, is_input=True))
        keys = self.keys([args, kwargs])
        self.inputs.append(_Entrance(entered, began=self.n_passages, keys=keys))
        self.n_passages += 1

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        """Note a module's output, and with it the call."""
        self.stack.pop()
        if name in self.joining:  # parts of an attention that were never complete
            for event in self.joining.pop(name).events:
                self.note(name, event)
        output_seen = self.see(
            output_tensor(module, output, self.trace.n_images),
            ModuleSide(name, is_input=False),
        )
        entrance = self.inputs.pop()
        call = Call(
            entered=entrance.seen,
            left=output_seen,
            left_type=type(output).__name__,
            began=entrance.began,
            ended=self.n_passages,
            inputs=entrance.keys,
            outputs=self.keys(output),
        )
        self.n_passages += 1
        self.trace.calls[name].append(call)

    def run_and_note(self, terms: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """Run a function and return its result; `trace.made_of` gets, for the result and for every
        argument that was changed in place, the arguments it came from.

        Args:
            terms: the tensors among the function's arguments.
            call: runs the function.
        """
        before = [self.key(x) for x in terms]
        result = call()
        after = [self.key(x) for x in terms]
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        for key in (*changed, *self.keys(result)):
            self.trace.made_of[key].update(term for term in before if term != key)
        return result

    def added(self, terms: list[Tensor], add: Callable[[], Tensor]) -> Tensor:
        """Return a sum, and note it if its terms have its shape.

        Args:
            terms: the two tensors, or one where the other is a product of which there is no tensor
                (addcmul); that gets an identity that no tensor has.
            add: computes the sum.
        """
        # Before the sum: it may change a term in place.
        terms_seen = [self.see(plain(x)) for x in terms]
        result = add()
        total = self.see(plain(result))
        if total is None:
            return result
        shape = _shape_without_leading_ones(total)
        keys = []
        for term in terms_seen:
            if term is None or _shape_without_leading_ones(term) != shape:
                return result
            keys.append(term.key)
        if len(keys) == 1:
            self.serial += 1
            keys.append((self.serial, 0))
        self.trace.sums[total.key] = keys[0], keys[1]
        return result

    def event(self, event: AttentionEvent) -> None:
        """Note an attention of the module that is running, joined where it comes in parts."""
        orders = self.trace.orders
        name = self.stack[-1] if self.stack else ""
        if self.is_of_clips and ModuleSide(name, is_input=True) not in orders:
            # Softmax as a module of its own: the attention is that of the module around it.
            for outer_name in reversed(self.stack):
                if ModuleSide(outer_name, is_input=True) in orders:
                    name = outer_name
                    break
        order = orders.get(ModuleSide(name, is_input=True))
        joined: AttentionEvent | None = event
        if order is not None:
            calls = self.joining.setdefault(name, order.calls(self.trace.n_images))
            joined = calls.add(event)
        if joined is not None:
            self.note(name, joined)

    def note(self, name: str, event: AttentionEvent) -> None:
        """Record an attention of a module, without its tensors."""
        value = None
        if event.call:
            # (images, heads, keys, head dim) -> (images, keys, heads x head dim)
            value = self.see(event.call.value.transpose(1, 2).flatten(2))
        without_tensors = {**vars(event), "call": None}
        self.trace.events[name].append(AttentionSeen(**without_tensors, value=value))


def _response_by_axis(x: Tensor) -> tuple[Tensor, ...]:
    """Return how strongly each index along each axis after the first responds to a change of each
    corner, (corners, length) an axis.

    x: a tensor of the pass on `probe_images` with corners.
    """
    # Images 0 and 1 are random; 2 and following are image 0 with a corner changed.
    change = (x[2 : 2 + N_CORNERS].float() - x[:1].float()).square()
    responses = []
    for axis in range(1, change.ndim):
        summed_axes = [i for i in range(1, change.ndim) if i != axis]
        responses.append(change.sum(summed_axes))
    return tuple(responses)


def _shape_without_leading_ones(seen: Seen) -> tuple[int, ...]:
    """Return a tensor's shape without axes of length 1 in front, which packed tokens get and
    lose."""
    first = next((i for i, n in enumerate(seen.shape) if n > 1), 0)
    return seen.shape[first:]


class _FunctionWatch(TorchFunctionMode):
    """A mode that tells a recorder which tensors are made of which, and which are added."""

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
            return self.recorder.run_and_note(activations, call)
        return call()


def trace(
    module: nn.Module,
    size: tuple[int, int, int],
    corners: bool,
    orders: Mapping[ModuleSide, Order | ClipOrder] | None = None,
) -> Trace:
    """Run the model once on random images, or clips, and return the record of every call.

    Only shapes and identities of activations are kept, so memory is that of the plain forward
    pass.

    Args:
        module: the model.
        size: (channels, rows, cols) of an image or frame.
        corners: whether images with changed corners are among them (`probe_images`).
        orders: module side -> the order in which the tokens there are recorded.

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
        """Note a module's input."""
        recorder.enter(name, args, kwargs)
        watch.depth += 1

    def leave(name: str, child: nn.Module, output: Any) -> None:
        """Note a module's output, after the attention that was computed in it."""
        if any(child.children()):
            # A leaf (the softmax itself, its dropout) is left before the product comes.
            watch.flush(watch.depth)
        watch.depth -= 1
        recorder.leave(name, child, output)

    hooks = hooked(module, enter, leave)
    with torch.inference_mode(False), torch.no_grad(), hooks, sums, watch:
        try:
            module(images.to(device))
        except _CODE_ERRORS as error:
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
                f"the model does not run on images of {size[1]} x {size[2]} pixels: "
                f"{text}; expected a size that it takes: try another --img-size"
            ) from error
    return record

"""Hooks that pass chosen activations to an observer while the model runs, and change nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import (
    AttentionCall,
    AttentionEvent,
    AttentionWatch,
)
from vitsee_core.models.hook_points import (
    CaptureError,
    HookPoint,
    input_tensor,
    output_tensor,
    refuse_compiled,
)
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
from vitsee_core.models.tokens.clip_order import ClipCalls
from vitsee_core.models.tokens.packed_order import JoinedCalls, Place
from vitsee_stores.layout import SiteSpec

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Consumer = Callable[[Tensor], None]


class Observer(Protocol):
    """Gets live tensors: whatever it wants to keep, it copies before it returns. What a subclass
    does not define passes by."""

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """tokens: prefix (images, prefix, dim) or None and body (images, rows, cols, dim), in image
        geometry; rows: body (images, rows, dim); vector: (images, dim); raw: as it is."""
        return

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Skip input and branch output of one residual sublayer: (images, tokens, dim)."""
        return

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """One block's attention."""
        return


class Hooks:
    """Consumers of hook points, by module: registered once, calls counted in every pass."""

    def __init__(self, module: nn.Module, table: SiteTable) -> None:
        self.module = module
        self.turned = table.turned
        self.orders = table.orders
        self.n_images = 0
        self.consumers: dict[Place, list[tuple[int, Consumer]]] = defaultdict(list)
        self.expected: dict[Place, tuple[int, str]] = {}
        self.counts: Counter[Place] = Counter()
        self.handles: list[RemovableHandle] = []

    def on(self, hook_point: HookPoint, consumer: Consumer, what: str) -> None:
        """Give the hook point's tensor to `consumer` in every pass; `what` names it in errors."""
        place = hook_point.module, hook_point.when == "in"
        self.consumers[place].append((hook_point.call, consumer))
        self.expected.setdefault(place, (hook_point.calls, what))

    def install(self) -> None:
        """Register one hook for each module and direction."""
        for place in self.consumers:
            child = self.module.get_submodule(place[0])
            see = partial(self._see, place)
            if place[1]:
                handle = child.register_forward_pre_hook(
                    lambda _m, args, kwargs, see=see: see(input_tensor(args, kwargs)),
                    with_kwargs=True,
                )
            else:
                handle = child.register_forward_hook(
                    lambda m, _, output, see=see: see(
                        output_tensor(m, output, self.n_images)
                    )
                )
            self.handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def check(self) -> None:
        """Raises:
        CaptureError: a module was called another number of times than its hook points expect.
        """
        for place, (calls, what) in self.expected.items():
            if self.counts[place] != calls:
                raise CaptureError(
                    f"{what}: module {place[0] or 'root'} was called {self.counts[place]} times in "
                    f"one forward pass, expected {calls}"
                )

    def to_grid_order(self, place: Place, x: Tensor) -> Tensor:
        """The tensor of a place with images in front, and its tokens in the image's order."""
        x = x.transpose(0, 1) if place in self.turned else x
        if place in self.orders:
            return self.orders[place].to_grid_order(x)
        return x

    def _see(self, place: Place, x: Tensor | None) -> None:
        call = self.counts[place]
        self.counts[place] += 1
        x = None if x is None else self.to_grid_order(place, x)
        # What an observer computes is no attention of the model, and the watch would cost each of
        # its thousands of calls some microseconds.
        with torch._C.DisableTorchFunction():
            for wanted, consume in self.consumers[place]:
                if wanted == call:
                    if x is None:
                        raise CaptureError(f"module {place[0]} gave no single tensor")
                    consume(x)


class Capture:
    """Context manager around a loaded model: hooks are installed on entry, removed on exit.

    Sites that are aliases are never delivered; their tensor comes under the stored name.
    """

    def __init__(
        self,
        model: LoadedModel,
        table: SiteTable,
        *,
        sites: Sequence[SiteSpec],
        sublayers: Sequence[Sublayer] = (),
        attention: Sequence[AttentionBlock] = (),
    ) -> None:
        refuse_compiled(model.module)
        self.model = model
        self.table = table
        self.watch = AttentionWatch(self._attended)
        self.watch.active = False
        self.hooks = Hooks(model.module, table)
        self._observer: Observer | None = None
        self._waiting: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._blocks = {table.attention_modules[block.name]: block for block in attention}
        self._current: AttentionBlock | None = None
        self._seen: Counter[str] = Counter()
        self._joining: dict[str, JoinedCalls | ClipCalls] = {}
        for site in sites:
            if site.alias_of is None:
                self._add_site(site)
        for sublayer in sublayers:
            self._add_sublayer(sublayer)

    def on_site(self, name: str, consumer: Consumer) -> None:
        """Give a site's tensor, as the model has it, to `consumer`; aliases are sites here. A site
        made of several tensors (the mean of two heads' inputs, the difference of two sums) comes
        once all are there."""
        point = self.table.points[name]
        if len(point.hook_points) == 1:
            self.hooks.on(point.hook_points[0], consumer, name)
            return
        for i, hook_point in enumerate(point.hook_points):

            def gather(x: Tensor, i: int = i) -> None:
                parts = self._waiting[f"{name} for {id(consumer)}"]
                # What a difference is taken from may be added to in place before the other comes.
                parts[i] = x.clone() if point.difference else x
                if len(parts) == len(point.hook_points):
                    if point.difference:
                        consumer(parts[0] - parts[1])
                    else:
                        consumer(torch.stack(list(parts.values())).mean(0))
                    parts.clear()

            self.hooks.on(hook_point, gather, name)

    def run(self, x: Tensor, observer: Observer) -> Any:
        """The model's own output for a batch, bit for bit; `observer` gets all that was chosen.

        Raises:
            CaptureError: a site was not captured as often as expected, or its first dimension
                is not the batch; what the observer got in this pass is then invalid.
        """
        if not self.hooks.handles:
            raise CaptureError(
                "hooks are not installed; expected: with Capture(...) as capture"
            )
        self._observer, self.hooks.n_images = observer, len(x)
        self.hooks.counts.clear()
        self._seen.clear()
        self._joining.clear()
        try:
            with self.watch if self._blocks else nullcontext():
                output = self.model.module(x)
        finally:
            self._observer = self._current = None
            self.watch.active = False
            self._waiting.clear()
        self.hooks.check()
        for block in self._blocks.values():
            if self._seen[block.name] != 1:
                raise CaptureError(
                    f"{block.name}: {self._seen[block.name]} attention calls in one forward pass, "
                    "expected 1"
                )
        return output

    def __enter__(self) -> Self:
        for path, block in self._blocks.items():
            child = self.model.module.get_submodule(path)
            self.hooks.handles += [
                child.register_forward_pre_hook(
                    lambda _m, _a, block=block: self._open(block)
                ),
                child.register_forward_hook(lambda _m, _a, _o: self._close()),
            ]
        self.hooks.install()
        if not self.hooks.handles:
            # Nothing chosen: run() is then the plain forward pass.
            self.hooks.on(HookPoint("", "in"), lambda _x: None, "input")
            self.hooks.install()
        return self

    def __exit__(self, *_error: object) -> None:
        self.hooks.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context without hooks, e.g. for a forward pass that another capture watches."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _add_site(self, site: SiteSpec) -> None:
        view = self.table.points[site.name].view

        def deliver(x: Tensor) -> None:
            self._whole(site.name, x)
            assert self._observer is not None
            self._observer.site(site, *view.split(x))

        self.on_site(site.name, deliver)

    def _add_sublayer(self, sublayer: Sublayer) -> None:
        residual = self.table.residuals[sublayer.name]
        for i, name in enumerate((residual.skip, residual.branch)):
            view = self.table.points[name].view

            def gather(
                x: Tensor, i: int = i, flat: Callable[[Tensor], Tensor] = view.flat
            ) -> None:
                self._whole(sublayer.name, x)
                parts = self._waiting[sublayer.name]
                parts[i] = flat(x)
                if len(parts) == 2:
                    assert self._observer is not None
                    self._observer.branch(sublayer, parts[0], parts[1])
                    del self._waiting[sublayer.name]

            self.on_site(name, gather)

    def _whole(self, name: str, x: Tensor) -> None:
        if len(x) != self.hooks.n_images:
            raise CaptureError(
                f"{name}: first dimension {len(x)} for a batch of {self.hooks.n_images} images"
            )

    def _open(self, block: AttentionBlock) -> None:
        self._current, self.watch.active = block, True

    def _close(self) -> None:
        self.watch.flush()
        self._current, self.watch.active = None, False

    def _attended(self, event: AttentionEvent) -> None:
        block = self._current
        if block is None or self._observer is None:
            return
        order = self.table.orders.get((self.table.attention_modules[block.name], True))
        if order is not None:
            calls = order.calls(self.hooks.n_images)
            joined = self._joining.setdefault(block.name, calls).add(event)
            if joined is None:
                return
            event = joined
        expected = (self.hooks.n_images, block.n_heads, block.layout.n_tokens)
        if event.call is None or event.query != expected or event.n_keys != expected[2]:
            raise CaptureError(
                f"{block.name}: attention of sizes {event.query} x {event.n_keys}, expected "
                f"{expected} x {expected[2]}"
            )
        if event.window != block.window:
            raise CaptureError(
                f"{block.name}: attention within windows of {event.window} cells, expected "
                f"{block.window}"
            )
        self._seen[block.name] += 1
        self._observer.attention(block, event.call)

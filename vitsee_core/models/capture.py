"""Hooks that pass chosen activations to an observer while the model runs, and change nothing.

table = site_table(model)
with Capture(model, table, sites=[table["blocks.3.out"]]) as capture:
logits = capture.run(images, observer)   # observer.site(...) was called
"""

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
    ModuleSide,
    input_tensor,
    output_tensor,
    refuse_compiled,
)
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
from vitsee_core.models.tokens.clip_order import ClipCalls
from vitsee_core.models.tokens.packed_order import JoinedCalls
from vitsee_stores.layout import SiteSpec

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Consumer = Callable[[Tensor], None]


class Observer(Protocol):
    """Receives the chosen tensors while the model runs.

    Tensors are the model's own: an observer copies what it keeps before it returns. Methods that a
    subclass does not define do nothing.
    """

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Receive one site of a batch, split by its kind.

        Args:
            site: the site.
            prefix: (images, prefix tokens, dim) of a site of tokens; None without prefix tokens
                and for other kinds.
            body: (images, rows, cols, dim) in image geometry for tokens, (images, rows, dim) for
                rows, (images, dim) for a vector, and for "raw" the tensor as it is.
        """
        return

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Receive the two terms of a residual sum, each (images, tokens, dim).

        Args:
            sublayer: the residual sublayer.
            z: what the skip connection carries.
            f: the branch's output.
        """
        return

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Receive the attention of one block; scores are computed from `call` on demand."""
        return


class Hooks:
    """The hooks on a model's modules, one for each module side, and who gets their tensors.

    Calls are counted in every pass: a hook point is one call of a module that may have several.
    """

    def __init__(self, module: nn.Module, table: SiteTable) -> None:
        self.module = module
        self.turned = table.turned
        self.orders = table.orders
        self.n_images = 0
        self.consumers: dict[ModuleSide, list[tuple[int, Consumer]]] = defaultdict(list)
        # Side -> how often its module is called in a pass, and who expects that, for errors.
        self.expected: dict[ModuleSide, tuple[int, str]] = {}
        self.counts: Counter[ModuleSide] = Counter()
        self.handles: list[RemovableHandle] = []

    def on(self, hook_point: HookPoint, consumer: Consumer, name: str) -> None:
        """Give the hook point's tensor to a consumer in every pass.

        Args:
            hook_point: where the tensor is.
            consumer: is called with the tensor.
            name: the site or sublayer, in errors.
        """
        # A side is hooked once, whatever the number of sites there; the call tells them
        # apart.
        self.consumers[hook_point.side].append((hook_point.call, consumer))
        self.expected.setdefault(hook_point.side, (hook_point.calls, name))

    def install(self) -> None:
        """Register one hook for each module side."""
        for side in self.consumers:
            child = self.module.get_submodule(side.module)
            if side.is_input:
                handle = child.register_forward_pre_hook(
                    partial(self._deliver_input, side), with_kwargs=True
                )
            else:
                handle = child.register_forward_hook(partial(self._deliver_output, side))
            self.handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def check(self) -> None:
        """Check the number of calls after a pass.

        Raises:
            CaptureError: a module was called another number of times than its hook points expect.
        """
        # A call that was never made is only seen afterwards.
        for side, (n_expected, name) in self.expected.items():
            n_calls = self.counts[side]
            if n_calls != n_expected:
                raise CaptureError(
                    f"{name}: module {side.module or 'root'} was called {n_calls} times "
                    f"in one forward pass, expected {n_expected}"
                )

    def to_grid_order(self, side: ModuleSide, x: Tensor) -> Tensor:
        """Return the tensor at a module side with images in front, and its tokens in the image's
        order."""
        if side in self.turned:
            x = x.transpose(0, 1)
        if side in self.orders:
            x = self.orders[side].to_grid_order(x)
        return x

    def _deliver_input(
        self, side: ModuleSide, _module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self._deliver(side, input_tensor(args, kwargs))

    def _deliver_output(
        self, side: ModuleSide, module: nn.Module, _args: Any, output: Any
    ) -> None:
        self._deliver(side, output_tensor(module, output, self.n_images))

    def _deliver(self, side: ModuleSide, x: Tensor | None) -> None:
        """Count a call, and pass its tensor to the consumers of this call."""
        call = self.counts[side]
        self.counts[side] += 1
        if x is not None:
            x = self.to_grid_order(side, x)
        # What an observer computes is not the model's attention, and the watch would cost each of
        # its thousands of calls some microseconds.
        with torch._C.DisableTorchFunction():
            for consumed_call, consume in self.consumers[side]:
                if consumed_call == call:
                    if x is None:
                        raise CaptureError(f"module {side.module} gave no single tensor")
                    consume(x)


class Capture:
    """A context manager around a loaded model: hooks are installed on entry, removed on exit.

    Sites that are aliases are never delivered; their tensor comes under the stored name.

    Args:
        model: the model.
        table: its sites.
        sites: the sites whose tensors the observer gets.
        sublayers: the residual sublayers whose terms it gets.
        attention: the blocks whose attention it gets.

    Raises:
        ModelError: parts of the model are compiled, where hooks see nothing.
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
        self.watch = AttentionWatch(self._on_attention)
        self.watch.active = False
        self.hooks = Hooks(model.module, table)
        self._observer: Observer | None = None
        # Parts of a site or sublayer that came, by name, until all are there.
        self._waiting: dict[str, dict[int, Tensor]] = defaultdict(dict)
        # By the path of the module, whose hooks turn the watch on and off.
        self._blocks = {table.attention_modules[block.name]: block for block in attention}
        self._current: AttentionBlock | None = None  # the block whose module is running
        self._n_attention_calls: Counter[str] = Counter()
        self._joining: dict[str, JoinedCalls | ClipCalls] = {}
        for site in sites:
            if site.alias_of is None:
                self._add_site(site)
        for sublayer in sublayers:
            self._add_sublayer(sublayer)

    def on_site(self, name: str, consumer: Consumer) -> None:
        """Give a site's tensor, as the model has it, to a consumer in every pass.

        A site made of several tensors (the mean of two heads' inputs, the difference of two sums)
        comes once all are there. Aliases are sites here.
        """
        point = self.table.points[name]
        if len(point.hook_points) == 1:
            self.hooks.on(point.hook_points[0], consumer, name)
            return
        for i, hook_point in enumerate(point.hook_points):

            def gather(x: Tensor, i: int = i) -> None:
                """Keep one tensor; with the last one call the consumer."""
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
        """Run the model on a batch, and return its output bit for bit as without hooks.

        Args:
            x: (images, channels, rows, cols), normalised.
            observer: gets all that was chosen, in the order of the forward pass.

        Raises:
            CaptureError: a site was not captured as often as expected, or its first dimension
                is not the batch; what the observer got in this pass is then invalid.
        """
        if not self.hooks.handles:
            raise CaptureError(
                "hooks are not installed; expected: with Capture(...) as capture"
            )
        self._observer = observer
        self.hooks.n_images = len(x)
        self.hooks.counts.clear()
        self._n_attention_calls.clear()
        self._joining.clear()
        try:
            # A TorchFunctionMode costs time at each function, so none without attention.
            with self.watch if self._blocks else nullcontext():
                output = self.model.module(x)
        finally:
            self._observer = None
            self._current = None
            self.watch.active = False
            self._waiting.clear()
        self.hooks.check()
        for block in self._blocks.values():
            n_calls = self._n_attention_calls[block.name]
            if n_calls != 1:
                raise CaptureError(
                    f"{block.name}: {n_calls} attention calls in one forward pass, "
                    f"expected 1"
                )
        return output

    def __enter__(self) -> Self:
        for path, block in self._blocks.items():
            child = self.model.module.get_submodule(path)
            begin = child.register_forward_pre_hook(partial(self._begin_attention, block))
            end = child.register_forward_hook(self._end_attention)
            self.hooks.handles += [begin, end]
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
        """Return a context without hooks, for a forward pass that another capture watches."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _add_site(self, site: SiteSpec) -> None:
        """Ask the hooks for a site that the observer gets."""
        view = self.table.points[site.name].view

        def deliver(x: Tensor) -> None:
            """Pass the site's tensor to the observer, split into prefix tokens and body."""
            # A wrong batch would be split into prefix and body without any error.
            self._require_batch(site.name, x)
            assert self._observer is not None
            prefix, body = view.split(x)
            self._observer.site(site, prefix, body)

        self.on_site(site.name, deliver)

    def _add_sublayer(self, sublayer: Sublayer) -> None:
        """Ask the hooks for both terms of a residual sum."""
        residual = self.table.residuals[sublayer.name]
        for i, name in enumerate((residual.skip, residual.branch)):
            view = self.table.points[name].view

            def gather(
                x: Tensor, i: int = i, flat: Callable[[Tensor], Tensor] = view.flat
            ) -> None:
                """Keep one term; with the second one pass both to the observer."""
                self._require_batch(sublayer.name, x)
                parts = self._waiting[sublayer.name]
                # (images, tokens, dim); 0 is the skip, 1 the branch
                parts[i] = flat(x)
                if len(parts) == 2:
                    assert self._observer is not None
                    self._observer.branch(sublayer, parts[0], parts[1])
                    del self._waiting[sublayer.name]

            self.on_site(name, gather)

    def _require_batch(self, name: str, x: Tensor) -> None:
        """Raise CaptureError unless the first dimension of a site's tensor is the batch."""
        if len(x) != self.hooks.n_images:
            raise CaptureError(
                f"{name}: first dimension {len(x)} for a batch of {self.hooks.n_images} "
                f"images"
            )

    def _begin_attention(self, block: AttentionBlock, *_hook_args: Any) -> None:
        self._current = block
        self.watch.active = True

    def _end_attention(self, *_hook_args: Any) -> None:
        # Before the block is left: a softmax whose product has not come is reported now.
        self.watch.flush()
        self._current = None
        self.watch.active = False

    def _on_attention(self, event: AttentionEvent) -> None:
        """Check an attention of the current block against the table, and pass it to the observer.

        Raises:
            CaptureError: other sizes or windows than the table says.
        """
        block = self._current
        if block is None or self._observer is None:
            return
        path = self.table.attention_modules[block.name]
        order = self.table.orders.get(ModuleSide(path, is_input=True))
        if order is not None:
            # Packed images and clips: one attention in several calls, which are joined
            # first.
            calls = order.calls(self.hooks.n_images)
            joined = self._joining.setdefault(block.name, calls).add(event)
            if joined is None:
                return
            event = joined
        # (images, heads, tokens)
        expected = (self.hooks.n_images, block.n_heads, block.layout.n_tokens)
        if event.call is None or event.query != expected or event.n_keys != expected[2]:
            raise CaptureError(
                f"{block.name}: attention of sizes {event.query} x {event.n_keys}, "
                f"expected {expected} x {expected[2]}"
            )
        if event.window != block.window:
            raise CaptureError(
                f"{block.name}: attention within windows of {event.window} cells, "
                f"expected {block.window}"
            )
        self._n_attention_calls[block.name] += 1
        self._observer.attention(block, event.call)

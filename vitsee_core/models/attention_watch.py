"""Attention as the model computes it, observed while fused kernels stay on.

A TorchFunctionMode sees the arguments of `scaled_dot_product_attention` and of an explicit softmax
with the product or einsum that follows it. Nothing is replaced, so the model's output keeps every
bit; the weights themselves are recomputed from the kernel's arguments.

torch computes nn.MultiheadAttention in one function. Whoever watches torch's functions gets that
one whole, without the product inside; and the output projection's weights are used without a call
of the module, so that no hook sees the heads' outputs. The same code runs here (`attend`), told
that nobody watches, and with the projection called: every bit is the one that torch gives. Layers
that torch also computes in one fused call where nothing has to be seen of them, in other roundings,
compute as their code says in every pass, so that a pass with hooks equals one without to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode

from vitsee_core.models.einsum_attention import read_einsum
from vitsee_core.models.hook_points import ForwardEnded

KERNEL = functional.scaled_dot_product_attention
# Functions as a mode sees them: the method and the functional form are different objects.
SOFTMAX = {torch.softmax, Tensor.softmax, functional.softmax}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
KERNEL_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


MULTIHEAD = functional.multi_head_attention_forward
# The heads of the layers that are running; where weights are asked for, these lie in the batch.
RUNNING: list[int] = []
_NUM_HEADS_ARG = 4  # position of num_heads among the arguments of MULTIHEAD
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class AttentionCall(ABC):
    """One block's attention over one batch. Tensors are the model's own: consume them at once.

    Attributes:
        n_images, n_heads, n_tokens: the sizes of the scores, (images, heads, tokens, tokens).
        value: (images, heads, tokens, head dim), grouped heads repeated.
        output: the model's own product of weights and values, of that shape.
    """

    n_images: int
    n_heads: int
    n_tokens: int
    value: Tensor
    output: Tensor

    @abstractmethod
    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """Return the input of the softmax, (images, heads, tokens, tokens) float32: scaled, with
        mask, bias and causality applied.

        Args:
            images: which images of the batch.
            out: a contiguous tensor that the scores are written to, None for a new one.
        """


def repeated(x: Tensor, n_heads: int) -> Tensor:
    """Return grouped heads, (images, groups, tokens, dim), once for each of their n_heads heads."""
    if x.shape[1] == n_heads:
        return x
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if x.shape != y.shape or x.stride() != y.stride():
        return False
    if x.is_meta:  # no addresses there, but storages that differ
        if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
            return False
        return bool(x.storage_offset() == y.storage_offset())
    return x.data_ptr() == y.data_ptr()


def _scaled_products_by_image(
    query: Tensor, key: Tensor, scale: float, out: Tensor
) -> None:
    """Write scale * query @ key^T of each image to `out`, image by image.

    Queries, keys and values come interleaved, and a product of one image takes them as they lie:
    over several images they would be copied first.
    """
    # (images, heads, head dim, keys)
    keys = key.transpose(2, 3)
    for image_query, image_key, product in zip(query, keys, out, strict=True):
        torch.baddbmm(product, image_query, image_key, beta=0, alpha=scale, out=product)


def _scaled_products_at_once(
    query: Tensor, key: Tensor, scale: float, out: Tensor
) -> None:
    """Write scale * query @ key^T to `out` in one call, which fills a GPU."""
    # (images x heads, tokens, head dim): one product of all.
    left = torch.mul(query, scale).flatten(0, 1)
    right = key.flatten(0, 1)
    torch.bmm(left, right.transpose(1, 2), out=out.flatten(0, 1))


class KernelCall(AttentionCall):
    """The arguments of one scaled_dot_product_attention."""

    def __init__(self, arguments: dict[str, Any], output: Tensor) -> None:
        self.query: Tensor = arguments["query"]
        self.key: Tensor = arguments["key"]
        self.mask: Tensor | None = arguments.get("attn_mask")
        self.causal: bool = bool(arguments.get("is_causal"))
        scale = arguments.get("scale")
        # The kernel's default, 1 / sqrt(head dim).
        self.scale: float = self.query.shape[-1] ** -0.5 if scale is None else scale
        self.output = output
        self.n_images, self.n_heads, self.n_tokens = self.query.shape[:3]
        self.value = repeated(arguments["value"], self.n_heads)

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """Return the scores of `AttentionCall`, computed from the kernel's arguments."""
        query = self.query[images].float()
        key = repeated(self.key[images].float(), self.n_heads)
        n, heads, tokens, n_keys = *query.shape[:3], key.shape[2]
        if out is None:
            out = query.new_empty(n, heads, tokens, n_keys)
        if query.device.type == "cpu":
            _scaled_products_by_image(query, key, self.scale, out)
        else:
            _scaled_products_at_once(query, key, self.scale, out)
        if self.mask is not None:
            mask = self.mask
            # (images, 1 or heads, queries, keys)
            if mask.ndim == 4 and mask.shape[0] == self.n_images > 1:
                mask = mask[images]  # else one for all images
            if mask.dtype == torch.bool:
                out.masked_fill_(~mask, float("-inf"))
            else:
                out.add_(mask)
        if self.causal:
            # Aligned at the first key, as torch defines is_causal.
            is_later = torch.ones(tokens, n_keys, dtype=torch.bool, device=out.device)
            out.masked_fill_(is_later.triu_(1), float("-inf"))
        return out


class SoftmaxCall(AttentionCall):
    """The argument of an explicit softmax and the value that its result was multiplied with."""

    def __init__(self, scores: Tensor, value: Tensor, output: Tensor) -> None:
        self.softmax_input = scores
        self.value = value
        self.output = output
        self.n_images, self.n_heads, self.n_tokens = scores.shape[:3]

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """Return the scores of `AttentionCall`: the softmax's own argument."""
        scores = self.softmax_input[images]
        if out is None:
            return scores.float()
        return out.copy_(scores)


@dataclass
class AttentionEvent:
    """A softmax over keys.

    Attributes:
        query: the sizes of its queries, (images, heads, queries) in plain attention.
        n_keys: the number of keys.
        mixed: whether something other than a product with the values used the softmax's result.
        over_last: whether the softmax was over the last axis of its argument.
        call: the tensors, where they have the four dimensions of plain attention.
        within: what part of a packed image's tokens a query sees, where that is not a window; None
            elsewhere.
        window: (rows, cols), or for clips (times, rows, cols), of the windows in which queries see
            tokens, in cells; they tile the grid from its first cell. None where queries see all.
    """

    query: tuple[int, ...]
    n_keys: int
    mixed: bool = False
    over_last: bool = True
    call: AttentionCall | None = None
    within: str | None = None
    window: tuple[int, ...] | None = None


class AttentionMode(TorchFunctionMode, ABC):
    """A mode that hands each function that torch runs to `called`; inside nn.MultiheadAttention,
    which torch computes in one function, those that `attend` runs in its place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            with self:
                return attend(*args, **kwargs)
        return self.called(func, args, kwargs)

    @abstractmethod
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func(*args, **kwargs)`, as it is or changed."""


class _PendingSoftmax(NamedTuple):
    """A softmax whose product with the values has not come.

    Attributes:
        scores: its argument.
        weights: its result.
        axis: the axis that it is over, from the end: -1 for the last.
        depth: of modules, when it ran.
        is_sure: whether it is attention whoever uses it; if not, only an einsum that multiplies
            it with values shows that it is.
    """

    scores: Tensor
    weights: Tensor
    axis: int
    depth: int
    is_sure: bool = True


class AttentionWatch(AttentionMode):
    """Reports every attention of the forward pass that runs inside it to `sink`.

    An explicit softmax is reported with the product that uses it, so that the values are known;
    `flush` (called where the module is left) reports one that no product used. `depth`, kept by
    the hooks on modules, is how deep in the model the forward pass is.
    """

    def __init__(self, sink: Callable[[AttentionEvent], None]) -> None:
        super().__init__()
        self.sink = sink
        self.active = True
        self.depth = 0
        self.pending: _PendingSoftmax | None = None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Report attention, and return the result as it is."""
        result = func(*args, **kwargs)
        if self.active:
            if func is KERNEL:
                self._kernel(args, kwargs, result)
            elif func in SOFTMAX:
                self._softmax(args, kwargs, result)
            elif self.pending is not None and func in _PRODUCT:
                self._product(args, result)
            elif self.pending is not None and func is torch.einsum:
                self._einsum(args, result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self.flush()
        self.pending = None

    def _by_head(self, x: Tensor) -> Tensor:
        """Return (images x heads, ...) of an nn.MultiheadAttention as (images, heads, ...)."""
        if RUNNING and x.ndim == 3:
            return x.unflatten(0, (-1, RUNNING[-1]))
        return x

    def _kernel(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Report a call of scaled_dot_product_attention."""
        arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
        if result.dtype != arguments["query"].dtype:
            # Autocast stands between what is seen here and the kernel: queries and keys that left
            # a normalisation in single precision were rounded to the type that the result has.
            for name, x in arguments.items():
                if isinstance(x, Tensor) and x.is_floating_point():
                    arguments[name] = x.to(result.dtype)
        query = arguments["query"]
        key = arguments["key"]
        call = KernelCall(arguments, result) if query.ndim == 4 else None
        self.sink(AttentionEvent(tuple(query.shape[:-1]), key.shape[-2], call=call))

    def _softmax(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Keep a softmax until a product uses it.

        One over another axis than the last has keys before queries, as k @ q^T gives them, or
        before images and heads. It is kept if there are as many of both: else it is a choice
        between branches, or one that normalises keys themselves (linear attention). Where the
        first axis, which mostly is that of images, has to be queries or keys for that (XLNet's
        `ijbn`), the einsum that follows decides.
        """
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(scores, Tensor) or scores.ndim < 3 or not isinstance(dim, int):
            return
        # From the end, as axes in front may be merged or missing (images x heads).
        axis = dim if dim < 0 else dim - scores.ndim
        n_keys = scores.shape[axis]
        over_first = axis == -scores.ndim
        is_sure = axis == -1
        if not is_sure:
            if scores.shape.count(n_keys) < 2:
                return
            is_sure = not over_first and scores.shape[1:].count(n_keys) > 1
        if not is_sure and self.pending is not None and self.pending.is_sure:
            return  # what is attention by itself still waits for its product
        self.flush()
        self.pending = _PendingSoftmax(scores, result, axis, self.depth, is_sure)

    def _product(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Report the pending softmax if a matrix product multiplies its result with the values."""
        assert self.pending is not None
        if not self.pending.is_sure:
            return
        scores = self.pending.scores
        weights = self.pending.weights
        axis = self.pending.axis
        # k @ q^T: the scores have keys before queries, and the product takes weights^T.
        if axis == -2 and scores.shape[-2] == scores.shape[-1]:
            scores = scores.transpose(-2, -1)
            weights = weights.transpose(-2, -1)
        elif axis != -1:
            return
        value: Tensor
        if _is_same_view(args[0], weights):
            value = args[1]
        elif _is_same_view(args[1], weights.transpose(-2, -1)):
            # value^T @ weights^T, as in LeViT's maps
            value = args[0].transpose(-2, -1)
            result = result.transpose(-2, -1)
        else:
            return
        self.pending = None
        self._report(self._by_head(scores), self._by_head(value), self._by_head(result))

    def _einsum(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Report the pending softmax if an einsum multiplies its result with the values."""
        assert self.pending is not None
        scores = self.pending.scores
        weights = self.pending.weights
        operands = [x for x in args if isinstance(x, Tensor)]
        # Any operand of the einsum may be the weights.
        for index, operand in enumerate(operands):
            turned = _is_same_view(operand, weights.transpose(-2, -1))
            if turned or _is_same_view(operand, weights):
                product = read_einsum(
                    args,
                    scores,
                    weights_at=index,
                    turned=turned,
                    softmax_axis=self.pending.axis,
                    result=result,
                )
                if product is not None:
                    *_, n_queries, n_keys = product.scores.shape
                    if not self.pending.is_sure and n_queries != n_keys:
                        return
                    self.pending = None
                    self._report(product.scores, product.value, product.output)
                return

    def _report(self, scores: Tensor, value: Tensor, output: Tensor) -> None:
        """Hand on a softmax's argument with the values that its result is multiplied with."""
        call = None
        if scores.ndim == 4 and value.ndim == 4:
            call = SoftmaxCall(scores, value, output)
        # (images, heads, queries)
        *query, n_keys = scores.shape
        self.sink(AttentionEvent(tuple(query), n_keys, call=call))

    def flush(self, depth: int = 0) -> None:
        """Report a softmax that ran at this depth of modules or deeper, and whose result no product
        has used."""
        if self.pending is not None and self.pending.depth >= depth:
            is_sure = self.pending.is_sure
            axis = self.pending.axis
            # As if the softmax had been over the last axis.
            *query, n_keys = self.pending.scores.movedim(axis, -1).shape
            self.pending = None
            if not is_sure:
                return
            event = AttentionEvent(tuple(query), n_keys, mixed=True, over_last=axis == -1)
            self.sink(event)


class FirstAttention(TorchFunctionMode):
    """A mode that ends a forward pass where attention is computed for the first time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is KERNEL or func in SOFTMAX:
            raise ForwardEnded
        return func(*args, **(kwargs or {}))


def attend(*args: Any, linear: Any = functional.linear, **kwargs: Any) -> Any:
    """Run torch's multi_head_attention_forward so that modes see the functions inside it.

    Args:
        args, kwargs: its arguments.
        linear: computes its products with weights, in place of torch's function.
    """
    # With has_torch_function true, torch hands the whole function to the mode and runs nothing.
    globals_inside = {
        **vars(functional),
        "has_torch_function": lambda _: False,
        "linear": linear,
    }
    body = _with_globals(MULTIHEAD, globals_inside)
    RUNNING.append(kwargs.get("num_heads") or args[_NUM_HEADS_ARG])
    try:
        return body(*args, **kwargs)
    finally:
        RUNNING.pop()


class MultiheadAttention(nn.MultiheadAttention):
    """torch's layer, whose output projection is called as a module, with (tokens, images, dim), so
    that hooks see the heads' outputs."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return what torch's `MultiheadAttention.forward` returns."""
        n_images = 1
        if query.ndim == 3:
            n_images = query.shape[0] if self.batch_first else query.shape[1]

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            """Call the module for the output projection, torch's function for other products."""
            if weight is not self.out_proj.weight:
                return functional.linear(x, weight, bias)
            projected: Tensor = self.out_proj(x.unflatten(0, (-1, n_images)))
            return projected.flatten(0, 1)

        functions = SimpleNamespace(**vars(functional))
        functions.multi_head_attention_forward = partial(attend, linear=linear)
        layer = _with_globals(
            nn.MultiheadAttention.forward, {**vars(activation), "F": functions}
        )
        return layer(self, query, *args, **kwargs)


def _with_globals(function: Any, names: dict[str, Any]) -> FunctionType:
    """Return a function with the same code and these global names."""
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__
    )


def without_fast_path(module: nn.Module) -> None:
    """Turn torch's fused path off while the module runs, where any part of it has one, for good.
    The fused path calls no modules, so that hooks would change the roundings."""
    for child in module.modules():
        if type(child) is nn.MultiheadAttention:
            child.__class__ = MultiheadAttention
    if not any(isinstance(child, _FUSED) for child in module.modules()):
        return
    before: list[bool] = []

    def enter(*_: Any) -> None:
        before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def leave(*_: Any) -> None:
        if before:  # not where an earlier hook refused the input
            torch.backends.mha.set_fastpath_enabled(before.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)

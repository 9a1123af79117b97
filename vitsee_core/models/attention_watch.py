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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode

from vitsee_core.models.einsum_attention import read_einsum
from vitsee_core.models.hook_points import ForwardEnded

KERNEL = functional.scaled_dot_product_attention
SOFTMAX = {torch.softmax, Tensor.softmax, functional.softmax}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
KERNEL_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


MULTIHEAD = functional.multi_head_attention_forward
# The heads of the layers that are running; where weights are asked for, these lie in the batch.
RUNNING: list[int] = []
_N_HEADS = 4  # the place of num_heads among its arguments
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class AttentionCall(ABC):
    """One block's attention over one batch. Tensors are the model's own: consume them at once.

    n_images, n_heads, n_tokens: the sizes of the scores (images, heads, tokens, tokens).
    value: (images, heads, tokens, head dim), grouped heads repeated; output: the model's own
        product of weights and values, of that shape.
    """

    n_images: int
    n_heads: int
    n_tokens: int
    value: Tensor
    output: Tensor

    @abstractmethod
    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """The input of the softmax for these images: (images, heads, tokens, tokens) float32,
        scaled, with mask, bias and causality applied; written to `out` if given (contiguous)."""


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(dtype)
    return x


def repeated(x: Tensor, n_heads: int) -> Tensor:
    """Grouped heads (images, groups, tokens, dim) as all heads."""
    if x.shape[1] == n_heads:
        return x
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    if x.shape != y.shape or x.stride() != y.stride():
        return False
    if x.is_meta:  # no addresses there, but storages that differ
        storages = x.untyped_storage()._cdata, y.untyped_storage()._cdata
        return bool(
            storages[0] == storages[1] and x.storage_offset() == y.storage_offset()
        )
    return x.data_ptr() == y.data_ptr()


def _by_image(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """Scaled products. Queries, keys and values come interleaved, and a product of one image takes
    them as they lie: over several images they would be copied first."""
    for one, other, product in zip(query, key.transpose(2, 3), out, strict=True):
        torch.baddbmm(product, one, other, beta=0, alpha=scale, out=product)


def _at_once(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """The same in one call, which fills a GPU."""
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
        self.scale: float = self.query.shape[-1] ** -0.5 if scale is None else scale
        self.output = output
        self.n_images, self.n_heads, self.n_tokens = self.query.shape[:3]
        self.value = repeated(arguments["value"], self.n_heads)

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """The scores of `AttentionCall`, computed from the kernel's arguments."""
        query = self.query[images].float()
        key = repeated(self.key[images].float(), self.n_heads)
        n, heads, tokens, n_keys = *query.shape[:3], key.shape[2]
        if out is None:
            out = query.new_empty(n, heads, tokens, n_keys)
        multiply = _by_image if query.device.type == "cpu" else _at_once
        multiply(query, key, self.scale, out)
        if self.mask is not None:
            several = self.mask.ndim == 4 and self.mask.shape[0] == self.n_images > 1
            mask = self.mask[images] if several else self.mask
            if mask.dtype == torch.bool:
                out.masked_fill_(~mask, float("-inf"))
            else:
                out.add_(mask)
        if self.causal:
            later = torch.ones(tokens, n_keys, dtype=torch.bool, device=out.device).triu_(
                1
            )
            out.masked_fill_(later, float("-inf"))
        return out


class SoftmaxCall(AttentionCall):
    """The argument of an explicit softmax and the value that its result was multiplied with."""

    def __init__(self, given: Tensor, value: Tensor, output: Tensor) -> None:
        self.given = given
        self.value = value
        self.output = output
        self.n_images, self.n_heads, self.n_tokens = given.shape[:3]

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """The scores of `AttentionCall`: the softmax's own argument."""
        part = self.given[images]
        return part.float() if out is None else out.copy_(part)


@dataclass
class AttentionEvent:
    """A softmax over keys.

    query: the sizes of its queries, (images, heads, queries) in plain attention.
    mixed: something other than a product with the values used the softmax's result.
    call: the tensors, where they have the four dimensions of plain attention.
    within: of packed images: what part of an image's tokens a query sees, where that is no window;
        None elsewhere.
    window: rows and columns of cells, of clips times before these, of the windows in which queries
        see tokens, which tile the grid from its first cell; None where they see all.
    """

    query: tuple[int, ...]
    n_keys: int
    mixed: bool = False
    call: AttentionCall | None = None
    within: str | None = None
    window: tuple[int, ...] | None = None


class AttentionMode(TorchFunctionMode, ABC):
    """Hands each function that torch runs while it is entered to `called`; of an
    `nn.MultiheadAttention`, whose own kernel shows nothing, each of the functions in `attend`."""

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
        """The result of `func`, as it is or changed."""


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
        self.pending: tuple[Tensor, Tensor, int] | None = None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as it is, once it is reported."""
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
        """(images x heads, ...) of an nn.MultiheadAttention as (images, heads, ...)."""
        if RUNNING and x.ndim == 3:
            return x.unflatten(0, (-1, RUNNING[-1]))
        return x

    def _kernel(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        arguments = dict(zip(KERNEL_ARGS, args, strict=False)) | kwargs
        if result.dtype != arguments["query"].dtype:
            # Autocast stands between what is seen here and the kernel: queries and keys that left
            # a normalisation in single precision were rounded to the type that the result has.
            arguments = {name: _rounded(x, result.dtype) for name, x in arguments.items()}
        query = arguments["query"]
        key = arguments["key"]
        call = KernelCall(arguments, result) if query.ndim == 4 else None
        self.sink(AttentionEvent(tuple(query.shape[:-1]), key.shape[-2], call=call))

    def _softmax(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        given = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(given, Tensor) and given.ndim >= 3 and dim in (-1, given.ndim - 1):
            self.flush()
            self.pending = (given, result, self.depth)

    def _product(self, args: tuple[Any, ...], result: Tensor) -> None:
        assert self.pending is not None
        given, weights, _ = self.pending
        value: Tensor
        if _same(args[0], weights):
            value = args[1]
        elif _same(
            args[1], weights.transpose(-2, -1)
        ):  # value^T @ weights^T, as in LeViT's maps
            value = args[0].transpose(-2, -1)
            result = result.transpose(-2, -1)
        else:
            return
        self.pending = None
        self._report(self._by_head(given), self._by_head(value), self._by_head(result))

    def _einsum(self, args: tuple[Any, ...], result: Tensor) -> None:
        assert self.pending is not None
        given, weights, _ = self.pending
        for place, operand in enumerate(x for x in args if isinstance(x, Tensor)):
            turned = _same(operand, weights.transpose(-2, -1))
            if turned or _same(operand, weights):
                product = read_einsum(args, given, place, turned, result)
                if product is not None:
                    self.pending = None
                    self._report(product.scores, product.value, product.output)
                return

    def _report(self, given: Tensor, value: Tensor, output: Tensor) -> None:
        """Hand on a softmax's argument with the values that its result is multiplied with."""
        call = None
        if given.ndim == 4 and value.ndim == 4:
            call = SoftmaxCall(given, value, output)
        self.sink(AttentionEvent(tuple(given.shape[:-1]), given.shape[-1], call=call))

    def flush(self, depth: int = 0) -> None:
        """Report a softmax, met at this depth or deeper, whose result no product has used."""
        if self.pending is not None and self.pending[2] >= depth:
            given = self.pending[0]
            self.pending = None
            self.sink(
                AttentionEvent(tuple(given.shape[:-1]), given.shape[-1], mixed=True)
            )


class FirstAttention(TorchFunctionMode):
    """Ends a forward pass where attention is computed for the first time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is KERNEL or func in SOFTMAX:
            raise ForwardEnded
        return func(*args, **(kwargs or {}))


def attend(*args: Any, linear: Any = functional.linear, **kwargs: Any) -> Any:
    """torch's multi_head_attention_forward, in sight of who watches; linear: its products with
    weights."""
    shown = {"has_torch_function": lambda _: False, "linear": linear}
    body = _with(MULTIHEAD, {**vars(functional), **shown})
    RUNNING.append(kwargs.get("num_heads") or args[_N_HEADS])
    try:
        return body(*args, **kwargs)
    finally:
        RUNNING.pop()


class MultiheadAttention(nn.MultiheadAttention):
    """torch's layer, its output projection called with (tokens, images, dim)."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Attention as torch's `MultiheadAttention.forward` returns it."""
        n_images = query.shape[0 if self.batch_first else 1] if query.ndim == 3 else 1

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is not self.out_proj.weight:
                return functional.linear(x, weight, bias)
            projected: Tensor = self.out_proj(x.unflatten(0, (-1, n_images)))
            return projected.flatten(0, 1)

        called = {"multi_head_attention_forward": partial(attend, linear=linear)}
        functions = SimpleNamespace(**{**vars(functional), **called})
        layer = _with(nn.MultiheadAttention.forward, {**vars(activation), "F": functions})
        return layer(self, query, *args, **kwargs)


def _with(function: Any, names: dict[str, Any]) -> FunctionType:
    """The same code with other global names."""
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__
    )


def without_fast_path(module: nn.Module) -> None:
    """Turn torch's fused path off while the module runs, where any part of it has one."""
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

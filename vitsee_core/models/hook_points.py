"""Where in the forward pass a tensor is captured (`HookPoint`), how it is read as tokens (`View`),
and `BranchOnly`, which stands in for a residual branch that is to ignore its skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

SUMS = {
    torch.add,
    Tensor.add,
    Tensor.add_,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
}
# Sums with a product, x + a * b, of which no tensor holds the product.
SCALED_SUMS = {torch.addcmul, Tensor.addcmul, Tensor.addcmul_}
MAX_NAMES_SHOWN = 4  # in an error line
Form = Literal["tokens", "nhwc", "nchw", "unrolled", "rows", "vector", "raw"]


class ModelError(VitseeError):
    """A model that cannot be made, loaded or read."""


def some(names: Sequence[str]) -> str:
    """Return the first names for an error line, `a, b, c, d, ...`."""
    text = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        text += ", ..."
    return text


class CaptureError(VitseeError):
    """A site was not captured as the model's table says."""


class ForwardEnded(Exception):
    """Raised by a hook to end a forward pass once the tensor that was looked for is captured."""


class ModuleSide(NamedTuple):
    """The input or the output of a module, by the module's path; "" is the model itself."""

    module: str
    is_input: bool


@dataclass(frozen=True)
class HookPoint:
    """The first tensor that goes into a module, or the tensor that comes out of it.

    Attributes:
        module: path of the module.
        when: "in" for its input, "out" for its output.
        call: which of the module's calls within a forward pass, from 0.
        calls: how many calls a forward pass has.
    """

    module: str
    when: Literal["in", "out"] = "out"
    call: int = 0
    calls: int = 1

    @property
    def side(self) -> ModuleSide:
        """The module's input or output, whatever the call."""
        return ModuleSide(self.module, is_input=self.when == "in")


@dataclass(frozen=True)
class View:
    """How a batch of one site is read: as tokens of an image grid, rows, a vector, or as it is.

    Attributes:
        form: "tokens" (images, tokens, dim), "nhwc" and "nchw" (images with channels last and
            first), "unrolled" (as `unroll` makes them), "rows" (images, rows, dim), "vector"
            (images, dim) or "raw".
        layout: prefix tokens and grid of "tokens"; None for forms that show their grid.
        unroll: the function that makes (images, rows, cols, dim) of an "unrolled" tensor.
    """

    form: Form
    layout: TokenLayout | None = None
    unroll: Callable[[Tensor], Tensor] | None = None

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the prefix tokens, (images, prefix, dim) or None, and the body.

        The body is (images, rows, cols, dim) for an image grid, (clips, times, rows, cols, dim) for
        a clip's, (images, rows, dim) for rows, (images, dim) for a vector. Both are views of `x`
        wherever its memory allows.
        """
        if self.form == "tokens":
            assert self.layout is not None and self.layout.grid is not None
            n_prefix = self.layout.n_prefix
            body = x[:, n_prefix:].unflatten(1, self.layout.body)
            if n_prefix == 0:
                return None, body
            return x[:, :n_prefix], body
        if self.form == "nchw":
            return None, x.permute(0, 2, 3, 1)
        if self.form == "unrolled":
            assert self.unroll is not None
            return None, self.unroll(x)
        if self.form == "vector":
            return None, x.flatten(1)
        return None, x

    def flat(self, x: Tensor) -> Tensor:
        """Return all tokens as (images, tokens, dim), prefix first."""
        if self.form == "nchw":
            return x.flatten(2).transpose(1, 2)
        if self.form == "nhwc":
            return x.flatten(1, 2)
        if self.form == "unrolled":
            assert self.unroll is not None
            return self.unroll(x).flatten(1, 2)
        return x

    def unflat(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return tokens (images, tokens, dim) in the shape of `like`, the inverse of `flat`; not
        for the form "unrolled"."""
        ordered = tokens.transpose(1, 2) if self.form == "nchw" else tokens
        return ordered.reshape(like.shape)


class BranchOnly(Tensor):
    """The branch f of a residual sum z + f that is to be left without z.

    A sum with one tensor of f's shape gives f itself, the same object and so to the bit. Any other
    function gets the plain f. Made by `branch_only`; the attribute `plain` is f.
    """

    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return f in place of a sum z + f, else the result of `func` on plain tensors."""
        terms = _unwrapped(args)
        if func in SUMS and len(args) == 2 and not kwargs:
            n_branches = sum(isinstance(term, BranchOnly) for term in args)
            if n_branches == 1 and all(isinstance(term, Tensor) for term in terms):
                f, z = terms
                if isinstance(args[1], BranchOnly):
                    z, f = terms
                if f.shape == z.shape:
                    # The type that the sum would have had (under autocast these differ).
                    return f.to(torch.result_type(f, z))
        return func(*terms, **_unwrapped(dict(kwargs or {})))


def branch_only(f: Tensor) -> Tensor:
    """Return a branch as a `BranchOnly`; gradients flow through it."""
    wrapped: BranchOnly = f.as_subclass(BranchOnly)
    wrapped.plain = f
    return wrapped


def plain(x: Tensor) -> Tensor:
    """Return the tensor that a `BranchOnly` stands for; any other tensor as it is."""
    return x.plain if isinstance(x, BranchOnly) else x


def _unwrapped(value: Any) -> Any:
    """Return a function's arguments with the plain tensor in place of each `BranchOnly`."""
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {key: _unwrapped(entry) for key, entry in value.items()}
    # Subclasses (torch.Size, named tuples) may not be made from one iterable.
    if type(value) in (tuple, list):
        return type(value)(_unwrapped(entry) for entry in value)
    return value


def first_tensor(value: Any, n_images: int | None = None) -> Tensor | None:
    """Return the tensor that a module's output, or another value, stands for; None where that is
    not clear.

    It is the only tensor anywhere in a tuple, list or mapping. Of several it is the only one with
    the batch in front, or else the first of a tuple, if no other has as many dimensions (features,
    then a state of another kind), square ones (attention weights) not counted.

    Args:
        value: a tensor, or tuples, lists and mappings of them.
        n_images: the size of the batch; None where it is not known.
    """
    candidates = list(tensors_in(value))
    if len(candidates) > 1 and n_images is not None:
        candidates = [x for x in candidates if x.ndim > 1 and len(x) == n_images]
        if len(candidates) > 1 and isinstance(value, tuple):
            first = value[0]
            if first is candidates[0]:
                rivals = [
                    x
                    for x in candidates[1:]
                    if x.ndim == first.ndim and x.shape[-1] != x.shape[-2]
                ]
                candidates = [first, *rivals]
    return candidates[0] if len(candidates) == 1 else None


def output_tensor(module: nn.Module, output: Any, n_images: int) -> Tensor | None:
    """Return the tensor that a module's output stands for, as `first_tensor` finds it; of an
    nn.MultiheadAttention, which returns weights as well, the first."""
    if isinstance(module, nn.MultiheadAttention):
        output = output[0]
    return first_tensor(output, n_images)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield plain(value)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)


def input_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a module works on: its first argument, or where all are passed by
    name the first tensor; None where the first argument is not a tensor."""
    if args:
        first = args[0]
        return plain(first) if isinstance(first, Tensor) else None
    for value in kwargs.values():
        if isinstance(value, Tensor):
            return plain(value)
    return None


@contextmanager
def hooked(
    module: nn.Module,
    enter: Callable[[str, Any, dict[str, Any]], None],
    leave: Callable[[str, nn.Module, Any], None] | None = None,
) -> Iterator[None]:
    """Return a context in which a module and all modules below it report their calls.

    Args:
        module: the model.
        enter: is called as `enter(name, args, kwargs)` before each module's forward.
        leave: is called as `leave(name, child, output)` after it. Neither's result is used.
    """
    with ExitStack() as stack:
        for name, child in module.named_modules():
            # The name is bound as a default: a closure would see the last name of the loop.
            def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                enter(name, args, kwargs)

            def after(child: nn.Module, _: Any, output: Any, name: str = name) -> None:
                assert leave is not None
                leave(name, child, output)

            stack.enter_context(child.register_forward_pre_hook(before, with_kwargs=True))
            if leave is not None:
                stack.enter_context(child.register_forward_hook(after))
        yield


def refuse_compiled(module: nn.Module) -> None:
    """Raise ModelError if parts are compiled, traced or scripted, so that hooks are lost."""
    for name, child in module.named_modules():
        scripted = isinstance(child, torch.jit.ScriptModule)
        traced = isinstance(child, torch.fx.GraphModule)
        compiled = hasattr(child, "_orig_mod") or child._compiled_call_impl is not None
        if scripted or traced or compiled:
            kind = "compiled"
            if scripted:
                kind = "scripted"
            elif traced:
                kind = "an fx graph"
            raise ModelError(
                f"the model's {name or 'root module'} is {kind}, where hooks see nothing; "
                "expected plain modules: the model before torch.compile, torch.jit or torch.fx"
            )

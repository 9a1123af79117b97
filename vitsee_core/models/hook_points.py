"""The place where a tensor is captured in the forward pass, and the way in which it is read as
tokens; the stand-in for a branch that is to ignore its skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

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
SHOWN = 4  # names in an error line
Form = Literal["tokens", "nhwc", "nchw", "unrolled", "rows", "vector", "raw"]


class ModelError(VitseeError):
    """A model that cannot be made, loaded or read."""


def some(names: Sequence[str]) -> str:
    """The first names, `a, b, c, d, ...`."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


class CaptureError(VitseeError):
    """A site was not captured as the model's table says."""


class ForwardEnded(Exception):
    """Raised by a hook to end a forward pass once the wanted tensor was captured."""


@dataclass(frozen=True)
class HookPoint:
    """The first tensor that goes into a module, or the one that comes out of it.

    `call` counts the module's calls within a forward pass, `calls` is how many there are.
    """

    module: str
    when: Literal["in", "out"] = "out"
    call: int = 0
    calls: int = 1


@dataclass(frozen=True)
class View:
    """How a batch of one site is read: as tokens of an image grid, rows, a vector, or as it is."""

    form: Form
    layout: TokenLayout | None = None
    unroll: Callable[[Tensor], Tensor] | None = None

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Prefix (images, prefix, dim) or None, and body: (images, rows, cols, dim) for an image
        grid, (clips, times, rows, cols, dim) for a clip's, (images, rows, dim) for rows, (images,
        dim) for a vector; views of `x` wherever its memory allows.
        """
        if self.form == "tokens":
            assert self.layout is not None and self.layout.grid is not None
            n = self.layout.n_prefix
            return (x[:, :n] if n else None), x[:, n:].unflatten(1, self.layout.body)
        if self.form == "nchw":
            return None, x.permute(0, 2, 3, 1)
        if self.form == "unrolled":
            assert self.unroll is not None
            return None, self.unroll(x)
        return None, x.flatten(1) if self.form == "vector" else x

    def flat(self, x: Tensor) -> Tensor:
        """All tokens as (images, tokens, dim), prefix first."""
        if self.form == "nchw":
            return x.flatten(2).transpose(1, 2)
        if self.form == "nhwc":
            return x.flatten(1, 2)
        if self.form == "unrolled":
            assert self.unroll is not None
            return self.unroll(x).flatten(1, 2)
        return x

    def unflat(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The inverse of `flat`, in the shape of `like`; not of "unrolled" tokens."""
        ordered = tokens.transpose(1, 2) if self.form == "nchw" else tokens
        return ordered.reshape(like.shape)


class BranchOnly(Tensor):
    """f of a residual sum z + f that is to be left without z: a sum with one tensor of its own
    shape gives f itself, the same object and so to the bit. Any other function gets the plain f.

    Made by `branch_only`; `plain` is f.
    """

    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The sum's stand-in, or `func` of plain tensors."""
        terms = _plain(args)
        if func in SUMS and len(args) == 2 and not kwargs:
            number = sum(isinstance(term, BranchOnly) for term in args)
            if number == 1 and all(isinstance(term, Tensor) for term in terms):
                f, z = terms if isinstance(args[0], BranchOnly) else terms[::-1]
                if f.shape == z.shape:
                    # The type that the sum would have had (under autocast these differ).
                    return f.to(torch.result_type(f, z))
        return func(*terms, **_plain(dict(kwargs or {})))


def branch_only(f: Tensor) -> Tensor:
    """`f` as an `BranchOnly`; gradients flow through it."""
    wrapped: BranchOnly = f.as_subclass(BranchOnly)
    wrapped.plain = f
    return wrapped


def plain(x: Tensor) -> Tensor:
    """The tensor that an `BranchOnly` stands for; any other as it is."""
    return x.plain if isinstance(x, BranchOnly) else x


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_plain(entry) for entry in value)
    return value


def first_tensor(value: Any, n_images: int | None = None) -> Tensor | None:
    """The tensor itself, or the only tensor anywhere in a tuple, list or mapping; of several the
    only one that has the batch in front, or a tuple's first one if no other has as many
    dimensions (features, then a state of another kind) but square ones (attention weights). Else
    None."""
    found = list(tensors_in(value))
    if len(found) > 1 and n_images is not None:
        found = [x for x in found if x.ndim > 1 and len(x) == n_images]
        if (
            len(found) > 1
            and isinstance(value, tuple)
            and (first := value[0]) is found[0]
        ):
            alike = [x for x in found[1:] if x.ndim == first.ndim]
            found = [
                first,
                *(x for x in alike if x.ndim < 2 or x.shape[-1] != x.shape[-2]),
            ]
    return found[0] if len(found) == 1 else None


def output_tensor(module: nn.Module, output: Any, n_images: int) -> Tensor | None:
    """The tensor a module gives; of an nn.MultiheadAttention, which gives weights as well, the
    first."""
    if isinstance(module, nn.MultiheadAttention):
        output = output[0]
    return first_tensor(output, n_images)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists and mappings of them."""
    if isinstance(value, Tensor):
        yield plain(value)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)


def input_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor a module works on: its first argument."""
    if args:
        return plain(args[0]) if isinstance(args[0], Tensor) else None
    return next(
        (plain(value) for value in kwargs.values() if isinstance(value, Tensor)), None
    )


@contextmanager
def hooked(
    module: nn.Module,
    enter: Callable[[str, Any, dict[str, Any]], None],
    leave: Callable[[str, nn.Module, Any], None] | None = None,
) -> Iterator[None]:
    """Context in which `enter(name, args, kwargs)` is called before each module below this one,
    and itself, and `leave(name, child, output)` after it; what they return is not used."""
    with ExitStack() as stack:
        for name, child in module.named_modules():

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
            kind = "scripted" if scripted else "an fx graph" if traced else "compiled"
            raise ModelError(
                f"the model's {name or 'root module'} is {kind}, where hooks see nothing; "
                "expected plain modules: pass the model as timm.create_model returns it"
            )

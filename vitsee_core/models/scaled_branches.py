"""The products that a model adds to its residual stream, read while it runs.

Where a branch is scaled before it is added, x + gate * f, no module gives what is added: gate may
be a bare parameter (LayerScale), a chunk of what a layer made of a timestep or a class (adaLN), its
tanh, a number per image. The product itself is a tensor of the forward pass, and with it
the sum can be verified to the last bit without knowing or fitting what f was multiplied with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.hook_points import SCALED_SUMS, HookPoint, output_tensor

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from vitsee_core.models.capture import Hooks

_MULTIPLY = {
    *(
        torch.mul,
        torch.multiply,
        Tensor.mul,
        Tensor.multiply,
        Tensor.mul_,
        Tensor.multiply_,
    ),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__),
}
_DIVIDE = {
    *(torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.div_),
    *(Tensor.__truediv__, Tensor.__itruediv__),
}
# What a scaled branch may pass through and stay the same numbers in the same order.
_CARRY = {
    *(Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.type),
    *(
        Tensor.contiguous,
        Tensor.clone,
        torch.clone,
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
    ),
    *(Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.squeeze, Tensor.unsqueeze),
}
MAX_PRODUCTS = 4  # of one branch: factors after one another


@dataclass
class _Followed:
    """A tensor that is the output of a sublayer's module times some factors. The tensor is held so
    that no other gets its id meanwhile."""

    tensor: Tensor
    factors: dict[str, tuple[Tensor, ...]]  # by sublayer, in the product's shape


class ScaledBranch(NamedTuple):
    """The output of a module times its factors, and these, laid out like what hooks give of it."""

    product: Tensor
    factors: tuple[Tensor, ...]


class ScaledBranches(TorchFunctionMode):
    """Notes what the outputs of chosen modules are multiplied with, in passes inside this context.

    Args:
        hooks: of the capture that runs the model.
        hook_points: sublayer -> the module's output that its branch is a multiple of.
    """

    def __init__(self, hooks: Hooks, hook_points: Mapping[str, HookPoint]) -> None:
        super().__init__()
        self.hooks = hooks
        self.hook_points = hook_points
        self.products: dict[str, list[ScaledBranch]] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.calls: Counter[str] = Counter()
        self.handles: list[RemovableHandle] = []
        self.followed: dict[int, _Followed] = {}

    def taken(self, name: str) -> list[ScaledBranch]:
        """Return the products of a sublayer's branch and let go of what was followed for them."""
        for key, followed in list(self.followed.items()):
            followed.factors.pop(name, None)
            if not followed.factors:
                del self.followed[key]
        shape = self.shapes.pop(name, None)
        products = self.products.pop(name, [])
        if shape is None:
            return []
        side = self.hook_points[name].side

        def laid(x: Tensor) -> Tensor:
            return self.hooks.to_grid_order(side, x.reshape(shape))

        return [
            ScaledBranch(laid(scaled.product), tuple(map(laid, scaled.factors)))
            for scaled in products
            if scaled.product.numel() == shape.numel()
        ]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.calls.clear()
        for name, hook_point in self.hook_points.items():
            child = self.hooks.module.get_submodule(hook_point.module)
            self.handles.append(child.register_forward_hook(partial(self._left, name)))
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.followed.clear()
        self.products.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in SCALED_SUMS and self.followed and len(args) == 3:
            scale = (kwargs or {}).get("value", 1)
            self._note_product(args[1:], args[1] * args[2] * scale)
        result = func(*args, **(kwargs or {}))
        if self.followed and isinstance(result, Tensor):
            if func in _MULTIPLY:
                self._note_product(args, result)
            elif func in _DIVIDE and self._followed(args[0]) is not None:
                self._note_product((args[0], 1 / torch.as_tensor(args[1])), result)
            elif func in _CARRY and (followed := self._followed(args[0])) is not None:
                self.followed[id(result)] = _Followed(result, followed.factors)
        return result

    def _followed(self, x: Any) -> _Followed | None:
        """Return the record of this very tensor."""
        followed = self.followed.get(id(x))
        if followed is not None and followed.tensor is x:
            return followed
        return None

    def _note_product(self, args: tuple[Any, ...], product: Tensor) -> None:
        """Note the product of a followed tensor and what it was multiplied with."""
        factors: dict[str, tuple[Tensor, ...]] = {}
        for x, other in (args[:2], args[1::-1]):
            followed = self._followed(x)
            if followed is None:
                continue
            factor = torch.as_tensor(other).broadcast_to(product.shape)
            for name, before in followed.factors.items():
                factors[name] = (*before, factor)
        if not factors:
            return
        self.followed[id(product)] = _Followed(product, factors)
        for name, factors_of_name in factors.items():
            products = self.products.setdefault(name, [])
            if len(products) < MAX_PRODUCTS:
                # A copy: the product may become the sum in place.
                products.append(ScaledBranch(product.clone(), factors_of_name))

    def _left(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        call = self.calls[name]
        self.calls[name] += 1
        x = output_tensor(module, output, self.hooks.n_images)
        if call == self.hook_points[name].call and x is not None:
            followed = self._followed(x)
            before = {} if followed is None else followed.factors
            self.followed[id(x)] = _Followed(x, {**before, name: ()})
            self.shapes[name] = x.shape

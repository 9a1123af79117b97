"""A module whose weights are plain tensors with values, as hooks, hashes and surveys expect it.

Parametrized weights (`torch.nn.utils.parametrize`: weight norm, spectral norm, orthogonal ones, a
user's own) are computed anew from others at every access. In evaluation mode they are constants:
they become ordinary parameters, and the layer the class that it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vitsee_core.models.hook_points import ModelError

# The key under which torch keeps what `get_extra_state` gives, of any type.
EXTRA_STATE = "_extra_state"
# The member in which torch's quantised layers keep packed weights.
PACKED = "._packed_params"


def require_plain_tensors(module: nn.Module, name: str) -> None:
    """Refuse weights that are no dense tensors with values.

    Raises:
        ModelError: names the first that is lazy, on the meta device, nested, sparse, quantised,
            packed, or a tensor of a class of its own.
    """
    for key, tensor in _tensors(module):
        rejection = _rejection(tensor)
        if rejection is not None:
            raise ModelError(f"{name}: {key} {rejection}")
    for key, value in module.state_dict().items():
        if not isinstance(value, Tensor) and not key.endswith(EXTRA_STATE):
            layer = key.partition(PACKED)[0]
            raise ModelError(
                f"{name}: {layer} keeps a {type(value).__name__} in place of a weight, as "
                "quantised layers do that pack theirs; expected the model as it was "
                "before it was quantised"
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _rejection(tensor: Tensor) -> str | None:
    """Why a weight cannot be used; None if it can."""
    if is_lazy(tensor):
        return "has no shape yet, as lazy layers before their first batch; run the module once"
    if tensor.is_meta:
        return "is on the meta device, which has no values; expected a module on the CPU"
    if tensor.is_quantized:
        return "is quantised; expected the model as it was before (tensor.dequantize())"
    # Before the layout: that of a nested tensor may be strided or jagged.
    if tensor.is_nested:
        return "is a nested tensor; expected tensors of one shape"
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}); expected dense weights (tensor.to_dense())"
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"is a {kind}; expected a plain tensor (neither quantised nor sharded)"
    return None


def without_parametrizations(module: nn.Module) -> None:
    """Replace parametrized weights by their values; the module is in evaluation mode.

    Raises:
        ModelError: a parametrization cannot be computed, or gives another value each time.
    """
    for path, child in list(module.named_modules()):
        if not parametrize.is_parametrized(child):
            continue
        parametrizations = child.parametrizations
        assert isinstance(parametrizations, nn.ModuleDict)
        for key in list(parametrizations):
            name = f"{path}.{key}" if path else key
            try:
                value = _constant(child, key, name)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                text = " ".join(str(error).split())
                raise ModelError(
                    f"the parametrization of {name} fails: {text}"
                ) from error
            _replace(child, key, value)


def _constant(layer: nn.Module, key: str, name: str) -> Tensor:
    """The value of a parametrized weight. Raises ModelError: it changes from access to access."""
    with torch.no_grad():
        value: Tensor = getattr(layer, key).detach().clone()
        again: Tensor = getattr(layer, key)
    if not value.is_meta and not torch.equal(value.nan_to_num(), again.nan_to_num()):
        raise ModelError(
            f"the parametrization of {name} changes from run to run: noise, dropout or a "
            "power iteration that stays on; expected a model in evaluation mode"
        )
    return value


def _replace(layer: nn.Module, key: str, value: Tensor) -> None:
    """Make a parametrized weight an ordinary one with this value."""
    parametrizations = layer.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    originals = parametrizations[key]
    assert isinstance(originals, parametrize.ParametrizationList)
    was_buffer = not originals._parameters
    # torch would write the value into the memory of a single original, which layers may share.
    parametrize.remove_parametrizations(
        layer, key, leave_parametrized=not originals.is_tensor
    )
    delattr(layer, key)
    if was_buffer:
        layer.register_buffer(key, value)
    else:
        layer.register_parameter(key, nn.Parameter(value, requires_grad=False))

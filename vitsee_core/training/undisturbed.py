"""Measuring a model in the middle of its training, which goes on as if nothing had happened: a copy
of the model, and a context that restores what measuring may change in the process."""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from vitsee_core.models.hook_points import ModelError

# The attributes of a module that hold hooks, by their keys.
HOOKS = {key for key in vars(nn.Module()) if "_hooks" in key}
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module below torch.compile, DistributedDataParallel, DataParallel and the averages of
    torch and timm. Raises ModelError: its parameters are sharded over processes."""
    from timm.utils.model_ema import ModelEma, ModelEmaV2, ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    while True:
        if "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, (*WRAPPERS, AveragedModel, ModelEmaV2, ModelEmaV3)):
            module = module.get_submodule("module")
        elif isinstance(module, ModelEma):
            module = module.ema
        else:
            break
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "_sharded_size"):
            raise ModelError(
                f"{name} is sharded over processes (FSDP), and one of them cannot measure the "
                "model; expected a module with whole parameters, as under DistributedDataParallel"
            )
    return module


def cpu_copy(module: nn.Module) -> nn.Module:
    """A copy of a module on the CPU, with its parameters and buffers but without gradients, hooks
    and compiled calls. The module itself is only read; on a GPU it takes no memory.

    Hooks that belong to torch (weight norm, spectral norm, pruning) compute weights and are kept.

    Raises:
        ModelError: the module cannot be copied, or a function replaces a `forward`: that of the
            copy might run the module itself.
    """
    memo: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> None:
        """Have this tensor copied to the CPU, cut off from its graph."""
        own = tensor.detach().to("cpu", copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(own, own.is_floating_point()) if is_parameter else own

    forwards: list[tuple[str, str]] = []
    for name, child in module.named_modules():
        if "_orig_mod" in child._modules:
            continue
        for value in (*child._parameters.values(), *child._buffers.values(), *vars(child).values()):
            if isinstance(value, torch.Tensor):
                keep(value)
        for key, value in vars(child).items():
            if key in HOOKS and value:
                own = {k: hook for k, hook in value.items() if _is_torchs(hook)}
                memo[id(value)] = OrderedDict(own)
        if "forward" in vars(child):
            forwards.append((name.replace("._orig_mod", ""), _plain_forward(name, child)))
    try:
        # In place of what is compiled comes a copy of the module below it, the innermost first.
        for child in reversed(list(module.modules())):
            if "_orig_mod" in child._modules:
                memo[id(child)] = copy.deepcopy(child.get_submodule("_orig_mod"), memo)
        copied = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        kind = type(module).__name__
        raise ModelError(f"{kind} cannot be copied: {str(error).splitlines()[0]}") from error
    for name, key in forwards:
        child = copied.get_submodule(name)
        child.forward = vars(child).pop(key)
    return copied


def _is_torchs(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")


def _plain_forward(name: str, module: nn.Module) -> str:
    """The attribute with the `forward` that a module runs in its copy: without the autocast that
    accelerate puts around it. Raises ModelError: no method, which the copy would share."""
    key = "_original_forward" if "_original_forward" in vars(module) else "forward"
    if getattr(vars(module)[key], "__self__", None) is not module:
        raise ModelError(
            f"forward of {name or 'the model'} is replaced by a function, and a copy of the model "
            "would run it on the model itself; expected a method (types.MethodType)"
        )
    return key


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context with autocast off, gradients on and float32 as the default type, at whose end the
    process is as before: random state (Python, NumPy, torch on the CPU and on GPUs), default type
    and device, torch's threads, and filters of warnings."""
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if gpus else []
    dtype, n_threads = torch.get_default_dtype(), torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if gpus else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != n_threads:
                torch.set_num_threads(n_threads)
            if gpus:
                torch.cuda.set_rng_state_all(cuda)
            torch.set_rng_state(cpu)
            np.random.set_state(numpy)
            random.setstate(python)

"""A copy of a module that is trained, and a context in which measuring it leaves no trace."""

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
    """Return the module inside of wrappers.

    Wrappers are torch.compile, DistributedDataParallel, DataParallel, and the moving averages
    of torch and timm.

    Raises:
        ModelError: its parameters are sharded over processes.
    """
    from timm.utils.model_ema import ModelEma, ModelEmaV2, ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    # Wrappers are nested in any order: a compiled average, an average of a compiled module.
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
                f"{name} is sharded over processes (FSDP), and one of them cannot "
                "measure the model; expected a module with whole parameters, as under "
                "DistributedDataParallel"
            )
    return module


def cpu_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU, without gradients, hooks and compiled calls.

    Parameters and buffers are copied. The module itself is only read, and no memory of its
    GPU is taken. Hooks of torch (weight norm, spectral norm, pruning) compute weights and are
    kept.

    Raises:
        ModelError: the module cannot be copied, or a function replaces a `forward`: the copy
            might run the module itself.
    """
    # What `deepcopy` shall use in place of an object, by the object's id.
    memo: dict[int, Any] = {}

    def copy_tensor(tensor: torch.Tensor) -> None:
        """Copy a tensor to the CPU, cut off from its graph, into the memo."""
        copied = tensor.detach().to("cpu", copy=True)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, copied.is_floating_point())
        memo[id(tensor)] = copied

    forwards: list[tuple[str, str]] = []  # (module, attribute with its forward)
    for name, child in module.named_modules():
        if "_orig_mod" in child._modules:
            continue  # what is compiled comes by itself
        for value in (
            *child._parameters.values(),
            *child._buffers.values(),
            *vars(child).values(),
        ):
            if isinstance(value, torch.Tensor):
                copy_tensor(value)
        for key, hooks in vars(child).items():
            if key in HOOKS and hooks:
                memo[id(hooks)] = OrderedDict(
                    (hook_id, hook)
                    for hook_id, hook in hooks.items()
                    if type(hook).__module__.startswith("torch.nn.utils.")
                )
        if "forward" in vars(child):
            forwards.append((name.replace("._orig_mod", ""), _plain_forward(name, child)))
    try:
        # A compiled module is replaced by a copy of the module below it, the innermost first.
        for child in reversed(list(module.modules())):
            if "_orig_mod" in child._modules:
                memo[id(child)] = copy.deepcopy(child.get_submodule("_orig_mod"), memo)
        copied = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        kind = type(module).__name__
        raise ModelError(
            f"{kind} cannot be copied: {str(error).splitlines()[0]}"
        ) from error
    # `deepcopy` bound these methods to the copied modules; wrappers around them are dropped.
    for name, key in forwards:
        child = copied.get_submodule(name)
        child.forward = vars(child).pop(key)
    return copied


def _plain_forward(name: str, module: nn.Module) -> str:
    """Return the attribute that holds the `forward` of a module whose instance has one.

    accelerate puts autocast around `forward` and keeps the plain one under another name, which
    is returned then.

    Raises:
        ModelError: it is not a method, so that the copy would share it.
    """
    key = "_original_forward" if "_original_forward" in vars(module) else "forward"
    if getattr(vars(module)[key], "__self__", None) is not module:
        raise ModelError(
            f"forward of {name or 'the model'} is replaced by a function, and a copy of "
            "the model would run it on the model itself; expected a method "
            "(types.MethodType)"
        )
    return key


@contextmanager
def preserve_rng_and_modes() -> Iterator[None]:
    """Context with autocast off, gradients on and float32 as the default type.

    At its end the process is as before: random states (Python, NumPy, torch on the CPU and on
    GPUs), default type and device, torch's number of threads, and filters of warnings.
    """
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if gpus else []
    dtype = torch.get_default_dtype()
    n_threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if gpus else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        # Models are read and attention is summed in float32, whatever the training's default.
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

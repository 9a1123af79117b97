"""The parts of the whole model after its blocks: final norm, pooled vector, logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The model's own classifier modules; a distilled model has two, others one a stage."""
    getter = getattr(model, "get_classifier", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, TypeError, NotImplementedError):
        found = None
    return list(_each(found))


def likely_classifiers(model: nn.Module) -> list[nn.Module]:
    """The classifier modules of a model that names them, else the last linear layer of another,
    which may be none: whether it gives the logits is for a forward pass to say."""
    if callable(getattr(model, "get_classifier", None)):
        return classifiers(model)
    linear: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linear[-1:]


def _each(found: object) -> Iterator[nn.Module]:
    """The modules in lists of lists."""
    if isinstance(found, tuple | list | nn.ModuleList):
        for entry in found:
            yield from _each(entry)
    elif isinstance(found, nn.Module):
        yield found


def _takes_vector(trace: Trace, name: str) -> bool:
    seen = trace.by_image(trace.entered(name))
    return seen is not None and all(n == 1 for n in seen.shape[2:])


def _layer(model: nn.Module, trace: Trace, name: str) -> str:
    """The module whose input is timm's pre-logits.

    The classifier itself if a vector goes into it, or the module around it that also has its norm
    (timm's NormLinear), unless that is a head that returns pre-logits from within; else the last
    layer inside of the classifier that has a weight matrix (it pools first).
    """
    if _takes_vector(trace, name):
        around = [name]
        while around[-1].count("."):
            around.append(around[-1].rpartition(".")[0])
        forwards = [model.get_submodule(path).forward for path in around]
        if any("pre_logits" in inspect.signature(forward).parameters for forward in forwards):
            return name
        return [path for path in around if _takes_vector(trace, path)][-1]
    inner = [
        below
        for below, module in model.get_submodule(name).named_modules(prefix=name)
        if isinstance(module, nn.Linear | nn.Conv2d) and trace.once(below)
    ]
    return inner[-1] if inner else name


def final_norm(model: nn.Module, trace: Trace, blocks: Sequence[str]) -> str | None:
    """The path of the norm over all tokens behind the last block: `norm` at the root, else the one
    that the last block's sequence of tokens enters; None without any."""
    norm = getattr(model, "norm", None)
    if isinstance(norm, nn.Module):
        return None if isinstance(norm, nn.Identity) else "norm"
    end = trace.left(blocks[-1]) if blocks else None
    if end is None or len(end.shape) != 3:
        return None
    for name, module in model.named_modules():
        seen = trace.entered(name)
        if "norm" in type(module).__name__.lower() and seen and seen.key == end.key:
            return str(name)
    return None


def head_hook_points(
    model: nn.Module, trace: Trace, blocks: Sequence[str] = ()
) -> tuple[dict[str, tuple[HookPoint, ...]], dict[str, str]]:
    """Taps of `norm`, `pooled` and `logits`, and the reason for each that the model has not.

    pooled: timm's pre-logits, forward_head(pre_logits=True): what goes into the classifier, before
    a norm that is part of it; where there are two (distillation), the mean of what goes into each.
    """
    hook_points: dict[str, tuple[HookPoint, ...]] = {}
    missing: dict[str, str] = {}
    norm = final_norm(model, trace, blocks)
    after = None if norm is None else trace.by_image(trace.left(norm))
    if norm is not None and after and len(after.shape) >= 3:
        hook_points["norm"] = (HookPoint(norm),)
    names = {id(module): name for name, module in model.named_modules()}
    output = trace.by_image(trace.left(""))
    own = classifiers(model) or [
        module
        for module in likely_classifiers(model)
        if output and (left := trace.left(names[id(module)])) and left.key == output.key
    ]
    found = [names[id(module)] for module in own if id(module) in names]
    found = [_layer(model, trace, name) for name in found]
    entered = [trace.by_image(trace.entered(name)) for name in found]
    vectors = [x for x in entered if x and all(n == 1 for n in x.shape[2:])]
    if len({x.shape for x in vectors}) > 1:
        missing["pooled"] = "several classifiers, on vectors of different sizes"
    elif found and len(vectors) == len(found):
        same = len({x.key for x in vectors}) == 1
        hook_points["pooled"] = tuple(
            HookPoint(name, "in") for name in (found[:1] if same else found)
        )
    else:
        missing["pooled"] = "no vector goes into the classifier"
    is_head = any(not isinstance(module, nn.Identity) for module in own)
    if output is None or len(output.shape) != 2 or not is_head:
        missing["logits"] = "the model's output is no vector of logits"
    else:
        hook_points["logits"] = (HookPoint(""),)
    return hook_points, missing

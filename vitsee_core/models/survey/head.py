"""A model's head: the norm over all tokens, the vector that the classifier gets, and the logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.survey.tracing import Trace


def classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the classifier modules that a model names; a distilled one has two, others one a
    stage."""
    get_classifier = getattr(model, "get_classifier", None)
    if not callable(get_classifier):
        return []
    try:
        return list(_flat_modules(get_classifier()))
    except (AttributeError, TypeError, NotImplementedError):  # timm's for models without
        return []


def classifier_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the names of the classifier's tensors, as `head.`; () without a
    classifier."""
    # By identity: get_classifier returns modules, not their paths.
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(f"{names[id(m)]}." for m in classifiers(model) if id(m) in names)


def likely_classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the classifier modules of a model that names them, else the last linear layer.

    Whether that layer gives the logits is for a forward pass to say.
    """
    if callable(getattr(model, "get_classifier", None)):
        return classifiers(model)
    linear: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linear[-1:]


def final_norm(model: nn.Module, trace: Trace, blocks: Sequence[str]) -> str | None:
    """Return the path of the norm over all tokens behind the last block.

    It is `norm` at the root, else the norm that the last block's sequence of tokens enters; None
    without any.
    """
    norm = getattr(model, "norm", None)
    # timm's name; Identity where the norm comes after pooling (fc_norm).
    if isinstance(norm, nn.Module):
        return None if isinstance(norm, nn.Identity) else "norm"
    last_output = trace.left(blocks[-1]) if blocks else None
    if last_output is None or len(last_output.shape) != 3:
        return None
    for name, module in model.named_modules():
        seen = trace.entered(name)
        is_norm = "norm" in type(module).__name__.lower()
        if is_norm and seen and seen.key == last_output.key:
            return str(name)
    return None


def head_hook_points(
    model: nn.Module, trace: Trace, blocks: Sequence[str] = ()
) -> tuple[dict[str, tuple[HookPoint, ...]], dict[str, str]]:
    """Return the hook points of `norm`, `pooled` and `logits`, and for each that the model does not
    have the reason, except for `norm`.

    `pooled` is timm's pre-logits, forward_head(pre_logits=True): what goes into the classifier,
    before a norm that is part of it. Two hook points (distillation) stand for their mean.
    """
    hook_points: dict[str, tuple[HookPoint, ...]] = {}
    missing: dict[str, str] = {}
    norm = final_norm(model, trace, blocks)
    norm_output = None if norm is None else trace.by_image(trace.left(norm))
    if norm is not None and norm_output and len(norm_output.shape) >= 3:
        hook_points["norm"] = (HookPoint(norm),)

    heads = _find_heads(model, trace)
    names = {id(module): name for name, module in model.named_modules()}
    layers = []
    for head in heads:
        if id(head) in names:
            layers.append(_pooled_layer(model, trace, names[id(head)]))
    vectors = []
    for layer in layers:
        seen = trace.by_image(trace.entered(layer))
        # A map of 1 x 1 is a vector as well.
        if seen and all(n == 1 for n in seen.shape[2:]):
            vectors.append(seen)
    # Several heads on stages (of different widths) have no mean.
    if len({seen.shape for seen in vectors}) > 1:
        missing["pooled"] = "several classifiers, on vectors of different sizes"
    elif layers and len(vectors) == len(layers):
        if len({seen.key for seen in vectors}) == 1:  # one vector for all
            layers = layers[:1]
        hook_points["pooled"] = tuple(HookPoint(layer, "in") for layer in layers)
    else:
        missing["pooled"] = "no vector goes into the classifier"

    output = trace.by_image(trace.left(""))
    # timm leaves an Identity where num_classes is 0: the output is then the pooled
    # vector.
    has_head = any(not isinstance(head, nn.Identity) for head in heads)
    if output is None or len(output.shape) != 2 or not has_head:
        missing["logits"] = "the model's output is no vector of logits"
    else:
        hook_points["logits"] = (HookPoint(""),)
    return hook_points, missing


def _find_heads(model: nn.Module, trace: Trace) -> list[nn.Module]:
    """Return the classifiers that a model names, else the last linear layer if it gives the
    model's output."""
    named = classifiers(model)
    if named:
        return named
    names = {id(module): name for name, module in model.named_modules()}
    output = trace.by_image(trace.left(""))
    heads = []
    for module in likely_classifiers(model):
        seen = trace.left(names[id(module)])
        # The last linear layer by definition need not be the last that ran.
        if output and seen and seen.key == output.key:
            heads.append(module)
    return heads


def _pooled_layer(model: nn.Module, trace: Trace, classifier: str) -> str:
    """Return the path of the module whose input is timm's pre-logits.

    If a vector goes into the classifier: the outermost module around it that gets a vector, too
    (timm's NormLinear has its norm within), or the classifier itself where the `forward` of a
    module around it has `pre_logits`. Otherwise the last layer with weights within the classifier,
    as it pools first.
    """
    if _takes_vector(trace, classifier):
        # The classifier and the modules around it, outwards, up to a child of the model.
        paths = [classifier]
        while paths[-1].count("."):
            paths.append(paths[-1].rpartition(".")[0])
        for path in paths:
            parameters = inspect.signature(model.get_submodule(path).forward).parameters
            if "pre_logits" in parameters:
                return classifier
        return [path for path in paths if _takes_vector(trace, path)][-1]
    layers = []
    for path, module in model.get_submodule(classifier).named_modules(prefix=classifier):
        if isinstance(module, nn.Linear | nn.Conv2d) and trace.once(path):
            layers.append(path)
    return layers[-1] if layers else classifier


def _takes_vector(trace: Trace, path: str) -> bool:
    """Return whether a module's input is (images, channels), or has but axes of length 1 behind."""
    seen = trace.by_image(trace.entered(path))
    return seen is not None and all(n == 1 for n in seen.shape[2:])


def _flat_modules(modules: object) -> Iterator[nn.Module]:
    """Yield the modules in lists of lists; nothing for another object."""
    if isinstance(modules, tuple | list | nn.ModuleList):
        for entry in modules:
            yield from _flat_modules(entry)
    elif isinstance(modules, nn.Module):
        yield modules

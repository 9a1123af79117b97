"""Whether weights are a model's: the one rule, for weights of every source.

All tensors of the model but its classifier's are in the weights, with its sizes and as numbers of
its kind, and all of the weights is used but for a short list of known parts (`left_over`). Names
are cut as `names` says, and converted by the function that the library has for foreign layouts.
So nothing random is ever called trained, and no model that was cut or that lacks a part of its
arithmetic is taken for the whole one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.survey.structure import classifier_prefixes
from vitsee_core.models.weights.left_over import FIXED_TABLES, unknown
from vitsee_core.models.weights.names import (
    COPY_SHARE,
    MAX_PREFIX_WORDS,
    MIN_SHARE,
    Group,
    copy_rank,
    groups_of,
    unchunked,
    without_wrappers,
)
from vitsee_core.models.weights.origins import Origins
from vitsee_core.models.weights.positions import (
    Conversion,
    Resampling,
    fit_positions,
    resized,
)

State = dict[str, Tensor]
Convert = Callable[..., Any]
# Children of a model that are its classifier, where the model itself does not say which is.
CLASSIFIER_WORDS = frozenset(
    {
        "head",
        "heads",
        "fc",
        "classifier",
        "cls_classifier",
        "distillation_classifier",
        "head_dist",
        "aux_head",
        "AuxLogits",
    }
)
# transformers' layer over the class token, which its encoders are published without.
_POOLER = "pooler."
_FLOATS = tuple(
    getattr(torch, name)
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
)
EXPECTED = (
    "expected all but the classifier: try another MODEL or --model-arg (random weights are "
    "--random-init SEED)"
)


@dataclass
class Fit:
    """Weights under the model's names, and how they came there.

    prefix: cut from the names, as in the file. copies: other copies of the model in the file.
    missing: the model's tensors that keep their random values, its classifier's at most. left_over:
    the weights' tensors without use, those outside the prefix summed up as "part.* (n)". resampled:
    "NAME (shape) to (shape)". notes: what was assumed of position tables, for the user.
    """

    tensors: State
    prefix: str = ""
    copies: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    resampled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of the names of a model's classifier: what it says itself, or its layers that
    have a usual name."""
    stated = classifier_prefixes(model)
    if callable(getattr(model, "get_classifier", None)):
        return stated
    layers = (nn.Linear, nn.Conv2d, nn.Sequential)
    usual = [
        f"{name}."
        for name, child in model.named_children()
        if name in CLASSIFIER_WORDS and isinstance(child, layers)
    ]
    return (*usual, _POOLER)


def require_fit(
    who: str,
    *,
    missing: Sequence[str] = (),
    sizes: Sequence[str] = (),
    left_over: Sequence[str] = (),
    expected: str = EXPECTED,
) -> None:
    """Refuse weights that are not the model's. who: the file or the model, in the message.
    missing, left_over: names, without the classifier's and the known ones. sizes: "NAME (shape)
    for (shape)".

    Raises:
        ModelError: there are any.
    """
    problems = [
        f"{title} {len(names)} ({some(names)})"
        for title, names in (
            ("missing:", missing),
            ("of another size:", sizes),
            ("left over:", left_over),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{who} does not fit this model: {'; '.join(problems)}; {expected}"
        )


def require_numbers(
    who: str, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    """Refuse tensors whose values are not those that the model computes with: integers of quantised
    weights, complex numbers, and those without values. own: the model's tensors that they become.

    Raises:
        ModelError: names the first.
    """
    for name, x in stored.items():
        reason = _no_numbers(x, own[name])
        if reason is not None:
            raise ModelError(stored_type_problem(who, name, reason))


def stored_type_problem(who: str, name: str, kind: str) -> str:
    """The line for a tensor whose stored type has not the model's values."""
    return (
        f"{who}: {name} is {kind}; expected float32, float64, float16, bfloat16 or an 8-bit float: "
        "the weights before they were quantised"
    )


def _no_numbers(x: Tensor, own: Tensor) -> str | None:
    kind = str(x.dtype).removeprefix("torch.")
    if x.is_quantized or x.layout != torch.strided or x.is_meta:
        how = (
            "a quantised"
            if x.is_quantized
            else "a sparse"
            if not x.is_meta
            else "an empty"
        )
        return f"{how} tensor ({kind})"
    if own.is_floating_point() and x.dtype not in _FLOATS:
        return f"{kind} where the model has {str(own.dtype).removeprefix('torch.')}"
    if x.is_complex() and not own.is_complex():
        return f"{kind} where the model has {str(own.dtype).removeprefix('torch.')}"
    return None


def fit(
    model: nn.Module,
    state: Mapping[str, Tensor],
    who: str,
    *,
    convert: Convert | None = None,
    alone: bool = False,
    resampling: Resampling | None = None,
    whole: bool = True,
) -> Fit:
    """The tensors of a state dict under the model's names.

    Args:
        model: nothing is loaded into it.
        state: of a file.
        who: the file or the model, in messages.
        convert: see `Source.converter`.
        alone: the user named this part of a file, so that what lies beside the model's tensors is
            no concern.
        resampling: by default of position tables alone.
        whole: whether missing tensors and other sizes are refused here, and not by the caller.

    Raises:
        ModelError: the weights do not fit; names what is missing or left over.
    """
    resampling = resampling or Resampling()
    own = model.state_dict()
    renamed = unchunked(list(state), own)
    state = {renamed[name]: x for name, x in state.items()}
    group, others = _choose(state, own, model, convert)
    kept = {clean: state[name] for clean, name in group.names.items()}
    beside = [name for name in state if name not in set(group.names.values())]
    origins = Origins(kept)
    converted = _converted(model, kept, who, convert, origins)
    tensors = {name: x for name, x in converted.items() if name in own}
    sources: dict[str, frozenset[str]] = {}
    for name, x in tensors.items():
        sources[name] = origins.of(x) or frozenset({name} & kept.keys())
        stored = {source: kept[source] for source in sources[name]}
        require_numbers(who, stored, dict.fromkeys(stored, own[name]))
    conversion = Conversion(kept, tensors, sources, origins)
    tables, notes = fit_positions(model, conversion, resampling, who)
    used = frozenset().union(*sources.values())
    unused = [name for name in kept if name not in used]
    result = Fit(
        tensors, group.prefix, [other.label or "(no prefix)" for other in others]
    )
    result.notes = notes
    _judge(model, result, unused, set(converted), who, whole)
    if not alone:
        copies = [group.label, *(other.label for other in others)]
        require_fit(who, left_over=[] if not group.prefix else unknown(beside, copies))
    tops = Counter(_top(name) for name in beside)
    result.left_over += [f"{top}.* ({n})" for top, n in tops.items()]
    sizes = resized(conversion, patches=resampling.patches, who=who)
    said = {text.split(" ")[0] for text in sizes}
    result.resampled = sizes + [text for text in tables if text.split(" ")[0] not in said]
    return result


def _choose(
    state: State, own: Mapping[str, Tensor], model: nn.Module, convert: Convert | None
) -> tuple[Group, list[Group]]:
    """The copy of the model that is taken, and the other ones."""
    groups = groups_of(list(state), own.keys())
    if not groups or len(groups[0].names) < MIN_SHARE * len(own):
        groups = _foreign_groups(state, own, model, convert) or groups[:0]
    if not groups:
        words = {name: without_wrappers(name.split(".")) for name in state}
        return Group("", {".".join(cut) or name: name for name, cut in words.items()}), []
    most = len(groups[0].names)
    copies = [group for group in groups if len(group.names) >= COPY_SHARE * most]
    chosen = min(copies, key=lambda group: (copy_rank(group.prefix), len(group.prefix)))
    others = [group for group in copies if group is not chosen]
    return _filled(chosen, others, state, own), others


def _filled(
    group: Group, others: Sequence[Group], state: State, own: Mapping[str, Tensor]
) -> Group:
    """A group with all names of the file below its prefix, also those that the model lacks."""
    own_words = {word for name in own for word in name.split(".")}
    prefix = without_wrappers(group.prefix.split("."), own_words)
    taken = {name for other in others for name in other.names.values()}
    names = dict(group.names)
    for name in state:
        words = without_wrappers(name.split("."), own_words)
        rest = ".".join(words[len(prefix) :])
        below = words[: len(prefix)] == prefix and rest and name not in taken
        if below and not any(_is_below(words, other, own_words) for other in others):
            names.setdefault(rest, name)
    return Group(group.prefix, names)


def _is_below(words: list[str], group: Group, own_words: Collection[str]) -> bool:
    prefix = without_wrappers(group.prefix.split("."), own_words)
    return bool(prefix) and words[: len(prefix)] == prefix


def _foreign_groups(
    state: State, own: Mapping[str, Tensor], model: nn.Module, convert: Convert | None
) -> list[Group]:
    """Groups of a file in another layout, which has the model's names once it is converted: by the
    prefix before the layout's own names."""
    cut: dict[str, str] = {}
    for name in state:
        words = without_wrappers(name.split("."))
        if not words or ".".join(words) in cut:
            return []
        cut[".".join(words)] = name
    prefixes = {""}
    for name in cut:
        words = name.split(".")
        prefixes |= {
            ".".join(words[:n]) + "." for n in range(1, min(len(words), MAX_PREFIX_WORDS))
        }
    counts = Counter({p: sum(name.startswith(p) for name in cut) for p in prefixes})
    likely = [p for p, n in counts.items() if n >= MIN_SHARE * len(cut)]
    groups: list[tuple[int, Group]] = []
    for prefix in sorted(likely, key=len):
        inside = {
            name[len(prefix) :]: cut[name] for name in cut if name.startswith(prefix)
        }
        if convert is None:
            hits = 0
        else:
            part = {clean: state[name] for clean, name in inside.items()}
            try:
                converted = _call(convert, part, model)
            except (
                Exception
            ):  # not this layout; whatever is wrong shows with the chosen prefix
                converted = {}
            hits = sum(name in own for name in converted)
        groups.append((hits, Group(prefix, inside)))
    most = max((hits for hits, _ in groups), default=0)
    if not most:
        return [group for _, group in groups if not group.prefix]
    best = [group for hits, group in groups if hits >= COPY_SHARE * most]
    shortest: list[Group] = []  # `visual.` of CLIP's layout is a part of it, not a prefix
    for group in best:
        if not any(group.prefix.startswith(other.prefix) for other in shortest):
            shortest.append(group)
    return shortest


def _call(convert: Convert, state: State, model: nn.Module) -> State:
    """The converted state dict; some of timm's conversions take no model."""
    parameters = inspect.signature(convert).parameters
    converted: State
    if len(parameters) == 1:
        converted = convert(dict(state))
    elif "adapt_layer_scale" in parameters:
        older = any("gamma_1" in name for name in state)
        converted = convert(dict(state), model, adapt_layer_scale=older)
    else:
        converted = convert(dict(state), model)
    return converted


def _converted(
    model: nn.Module, kept: State, who: str, convert: Convert | None, origins: Origins
) -> State:
    """The state dict in the model's layout, floats in float32 at least."""
    wide: State = {}
    with origins:
        for name, x in kept.items():
            narrow = x.dtype in _FLOATS and x.element_size() < 4
            wide[name] = x.float() if narrow else x
        origins.add_inputs(wide)
        if convert is None:
            return wide
        try:
            converted = _call(convert, wide, model)
        except ModelError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{who} cannot be converted for this model ({type(error).__name__}: {text}); "
                "expected weights of the same architecture"
            ) from error
    return {name: x for name, x in converted.items() if isinstance(x, Tensor)}


def _judge(
    model: nn.Module,
    result: Fit,
    unused: Sequence[str],
    converted: Collection[str],
    who: str,
    whole: bool,
) -> None:
    """Refuse what does not fit; fill in `missing` and `left_over`. unused: the file's names inside
    the prefix that became nothing of the model's; converted: all names after the conversion."""
    own = model.state_dict()
    heads = classifier_names(model)
    sizes = {
        name: f"{name} {tuple(x.shape)} for {tuple(own[name].shape)}"
        for name, x in result.tensors.items()
        if x.shape != own[name].shape
    }
    # What torch's own strict loading does without, too: nothing computes with it.
    counters = {name for name in own if name.rpartition(".")[2] == "num_batches_tracked"}
    absent = [name for name in own if name not in result.tensors and name not in counters]
    buffers = {name for name, _ in model.named_buffers()}
    children = {name for name, _ in model.named_children()}
    left = [
        name
        for name in unused
        if name not in buffers and name.split(".")[-1] not in FIXED_TABLES
    ]
    # A conversion drops whole parts of a publication (the text's tower); of the model's own blocks
    # it must not.
    dropped = {n for n in left if n not in converted and n.split(".")[0] not in children}
    strange = [name for name in unknown(left) if name not in dropped]
    strange = [name for name in strange if not name.startswith(heads)]
    if whole:
        require_fit(
            who,
            missing=[name for name in absent if not name.startswith(heads)],
            sizes=[text for name, text in sizes.items() if not name.startswith(heads)],
            left_over=strange,
        )
    else:
        require_fit(who, left_over=strange)
    for name in sizes if whole else ():
        if name.startswith(heads):
            del result.tensors[name]
    result.missing = [
        n for n in own if n in absent or (n in sizes and n.startswith(heads))
    ]
    result.left_over = left + [text for n, text in sizes.items() if n.startswith(heads)]


def _top(name: str) -> str:
    """The word that names a copy or a part of a model in a file: the first that is no wrapper."""
    words = [word for word in without_wrappers(name.split(".")) if word != "model"]
    return words[0] if words else name

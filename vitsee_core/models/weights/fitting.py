"""The rule whether weights are a model's, the same for weights of every source.

All tensors of the model but its classifier's are in the weights, with its sizes and as numbers of
its kind, and all of the weights is used but for a short list of known parts (`left_over`). So
nothing random is ever called trained, and no model that was cut or that lacks a part of its
arithmetic is taken for the whole one.

`fit` applies the rule, in this order:

1. `copies`       chooses the tensors that are the model's, and cuts what stands before their names
2. `origins`      watches the library's function that converts foreign layouts to the model's
3. `require_numbers`   refuses quantised and complex values
4. `positions`    resamples position tables for another grid of patches
5. `require_fit`  refuses what is missing, of another size, or left over
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.survey.head import classifier_prefixes
from vitsee_core.models.weights.copies import (
    Convert,
    State,
    call_conversion,
    choose_copy,
)
from vitsee_core.models.weights.left_over import (
    FIXED_TABLES,
    adapter_names,
    is_counter,
    one_copy_alone,
    unknown,
)
from vitsee_core.models.weights.names import unchunked, without_wrappers
from vitsee_core.models.weights.origins import Origins
from vitsee_core.models.weights.positions import (
    Conversion,
    Resampling,
    fit_positions,
    resized,
)

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
# Types whose values are plain numbers; older versions of torch lack some of the 8-bit ones.
_FLOAT_NAMES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
_FLOATS = tuple(getattr(torch, name) for name in _FLOAT_NAMES if hasattr(torch, name))
EXPECTED = (
    "expected all but the classifier: try another MODEL or --model-arg (random weights are "
    "--random-init SEED)"
)


@dataclass
class Fit:
    """Weights under the model's names, and how they came there.

    Attributes:
        tensors: the model's name -> tensor, to be loaded with strict=False.
        prefix: what was cut from the file's names.
        copies: labels of other copies of the model in the file.
        missing: the model's tensors that keep their random values, its classifier's at most.
        left_over: the file's tensors without use; those outside the prefix are summed up as
            "part.* (n)".
        resampled: "NAME (shape) to (shape)" of tensors that were interpolated.
        notes: assumptions about position tables, for the user.
    """

    tensors: State
    prefix: str = ""
    copies: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    resampled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return the entries of `LoadedModel.weights` about the fit, without empty ones."""
        entries = {
            "missing": self.missing,
            "unexpected": self.left_over,
            "other_keys": self.copies,
            "resampled": self.resampled,
            "notes": self.notes,
        }
        return {key: values for key, values in entries.items() if values}


def fit(
    model: nn.Module,
    state: Mapping[str, Tensor],
    who: str,
    *,
    convert: Convert | None = None,
    ignore_beside: bool = False,
    resampling: Resampling | None = None,
    refuse_incomplete: bool = True,
) -> Fit:
    """Return the tensors of a state dict under the model's names, if the weights are the model's.

    Args:
        model: the model that the weights are for; nothing is loaded into it.
        state: a file's state dict, by its names there.
        who: the file or the model, as error messages call it.
        convert: the library's function from a file's layout to the model's (`Source.converter`).
        ignore_beside: whether tensors outside the model's prefix need no explanation, because the
            user named this part of the file.
        resampling: which tensors may be resampled; by default position tables alone.
        refuse_incomplete: whether missing tensors and other sizes are refused here. False where
            the caller's own strict loading does it.

    Raises:
        ModelError: the weights do not fit; the message names what is missing or left over.
    """
    resampling = resampling or Resampling()
    model_state = model.state_dict()

    # Which of the file's tensors are the model's, and under which names.
    renamed = unchunked(list(state), model_state)
    file_state = {renamed[name]: x for name, x in state.items()}
    copy, other_copies = choose_copy(file_state, model, convert)
    stored = {clean: file_state[name] for clean, name in copy.names.items()}
    adapters = adapter_names(unknown(list(stored)))
    if adapters and not adapter_names(model_state):
        raise ModelError(
            f"{who} does not fit this model: {len(adapters)} tensors of an adapter "
            f"({some(adapters)}); expected weights that it is merged into, as of peft's "
            "model.merge_and_unload().state_dict()"
        )
    names_in_copy = set(copy.names.values())
    names_beside = [name for name in file_state if name not in names_in_copy]

    # Into the model's layout, and from which stored tensors each result was made.
    origins = Origins(stored)
    converted = _convert_state(model, stored, convert, origins, who)
    tensors = {name: x for name, x in converted.items() if name in model_state}
    sources: dict[str, frozenset[str]] = {}
    for name, x in tensors.items():
        # A conversion that leaves torch (NumPy) loses the trail: then a stored tensor of the same
        # name is the source.
        sources[name] = origins.of(x) or frozenset({name} & stored.keys())
        stored_sources = {source: stored[source] for source in sources[name]}
        require_numbers(
            who, stored_sources, dict.fromkeys(stored_sources, model_state[name])
        )
    used = frozenset().union(*sources.values())
    # A tensor without elements (no register tokens) has no values that could be lost.
    unused = [name for name, x in stored.items() if name not in used and x.numel()]

    # Position tables change in `tensors`, before sizes are compared.
    conversion = Conversion(stored, tensors, sources, origins)
    positions = fit_positions(model, conversion, resampling, who)

    comparison = _compare(model, tensors, unused, converted)
    _require_known_grids(who, comparison, positions.unknown_grids)
    # Counters of a training loop stand beside the model's parts, in none of them.
    modules = {name for name, _ in model.named_modules() if name}
    unexplained = [
        name
        for name in comparison.unexplained
        if name.rpartition(".")[0] in modules or not is_counter(name, stored[name])
    ]
    if refuse_incomplete:
        require_fit(
            who,
            missing=comparison.missing,
            sizes=list(comparison.other_sizes.values()),
            left_over=unexplained,
            expected=one_copy_alone(unexplained, model_state) or EXPECTED,
        )
        # A classifier for other classes stays random; load_state_dict would refuse its tensors.
        for name in comparison.other_classifier_sizes:
            del tensors[name]
    else:
        require_fit(who, left_over=unexplained)
    if not ignore_beside and copy.prefix:
        labels = [copy.label, *(other.label for other in other_copies)]
        unexplained = [
            name
            for name in unknown(names_beside, labels)
            if not is_counter(name, file_state[name])
        ]
        require_fit(
            who,
            left_over=unexplained,
            expected=one_copy_alone(unexplained, model_state, copy.label) or EXPECTED,
        )

    n_beside_by_part = Counter(_part_name(name) for name in names_beside)
    sizes = resized(conversion, patches=resampling.patches, who=who)
    # A table whose whole shape changed is already in `sizes`, by the same first word.
    names_in_sizes = {text.split(" ")[0] for text in sizes}
    same_sized_tables = [
        text for text in positions.resampled if text.split(" ")[0] not in names_in_sizes
    ]
    return Fit(
        tensors,
        prefix=copy.prefix,
        copies=[other.label or "(no prefix)" for other in other_copies],
        missing=comparison.random_names,
        left_over=[
            *comparison.unused,
            *comparison.other_classifier_sizes.values(),
            *(f"{part}.* ({n})" for part, n in n_beside_by_part.items()),
        ],
        resampled=sizes + same_sized_tables,
        notes=positions.notes,
    )


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the names of a model's classifier: those that the model itself states,
    or its layers with a usual name."""
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
    """Refuse weights that are not the model's: any name in these lists is a reason.

    Args:
        who: the file or the model, as the message calls it.
        missing: names of the model that the weights lack, without the classifier's.
        sizes: "NAME (shape) for (shape)", without the classifier's.
        left_over: names of the weights without use, without those that `left_over` knows.
        expected: the end of the message, what to do instead.

    Raises:
        ModelError: there are any.
    """
    names_by_title = {
        "missing:": missing,
        "of another size:": sizes,
        "left over:": left_over,
    }
    problems = [
        f"{title} {len(names)} ({some(names)})"
        for title, names in names_by_title.items()
        if names
    ]
    if problems:
        raise ModelError(
            f"{who} does not fit this model: {'; '.join(problems)}; {expected}"
        )


def _require_known_grids(
    who: str, comparison: _Comparison, unknown_grids: Mapping[str, int]
) -> None:
    """Refuse weights of which nothing but the grids of position tables is unknown.

    Raises:
        ModelError: names the option that says the grid.
    """
    sizes = comparison.other_sizes
    if not sizes or comparison.missing or comparison.unexplained:
        return
    if sizes.keys() <= unknown_grids.keys():
        name = next(iter(sizes))
        raise ModelError(
            f"{who}: {name} has {unknown_grids[name]} positions, which are no square, and does not "
            "say its grid; expected --weights-size ROWSxCOLS, the size in pixels of the images "
            "that the weights were trained with"
        )


def require_numbers(
    who: str, stored: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> None:
    """Refuse tensors whose values are not those that the model computes with: integers of quantised
    weights, complex numbers, and tensors without values.

    Args:
        who: the file or the model, as the message calls it.
        stored: the file's tensors by name.
        targets: name in `stored` -> the model's tensor that it becomes.

    Raises:
        ModelError: names the first.
    """
    for name, x in stored.items():
        stored_type = _unusable_type(x, targets[name])
        if stored_type is not None:
            raise ModelError(stored_type_problem(who, name, stored_type))


def stored_type_problem(who: str, name: str, stored_type: str) -> str:
    """Return the error line for a tensor whose stored type does not have the model's values."""
    return (
        f"{who}: {name} is {stored_type}; expected float32, float64, float16, bfloat16 or an 8-bit "
        "float: the weights before they were quantised"
    )


def _unusable_type(x: Tensor, target: Tensor) -> str | None:
    """Return what a stored tensor is, in the words of the error line, where its values cannot
    become those of `target`; None where they can."""
    dtype_name = str(x.dtype).removeprefix("torch.")
    if x.is_quantized:
        return f"a quantised tensor ({dtype_name})"
    if x.is_meta:
        return f"an empty tensor ({dtype_name})"
    if x.layout != torch.strided:
        return f"a sparse tensor ({dtype_name})"
    is_number = not target.is_floating_point() or x.dtype in _FLOATS
    drops_imaginary_part = x.is_complex() and not target.is_complex()
    if not is_number or drops_imaginary_part:
        target_dtype_name = str(target.dtype).removeprefix("torch.")
        return f"{dtype_name} where the model has {target_dtype_name}"
    return None


def _convert_state(
    model: nn.Module, stored: State, convert: Convert | None, origins: Origins, who: str
) -> State:
    """Return the state dict in the model's layout; `origins` records what each tensor came from.

    Raises:
        ModelError: the library's conversion fails on these names or shapes.
    """
    with origins:
        # The model computes in float32, and the CPU does not interpolate in every narrower type.
        wide: State = {}
        for name, x in stored.items():
            is_narrow = x.dtype in _FLOATS and x.element_size() < 4
            wide[name] = x.float() if is_narrow else x
        origins.add_inputs(wide)
        if convert is None:
            return wide
        try:
            converted = call_conversion(convert, wide, model)
        except ModelError:
            raise
        except Exception as error:  # a library's function, written for sound files alone
            text = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{who} cannot be converted for this model ({type(error).__name__}: {text}); "
                "expected weights of the same architecture"
            ) from error
    return {name: x for name, x in converted.items() if isinstance(x, Tensor)}


class _Comparison(NamedTuple):
    """The differences between a model and the weights for it, the classifier's apart.

    Attributes:
        missing: the model's names outside its classifier that the weights lack.
        random_names: all of the model's names that keep their random values.
        other_sizes: name -> "NAME (shape) for (shape)", outside the classifier.
        other_classifier_sizes: the same for the classifier.
        unused: the file's names that became nothing of the model's, without fixed tables.
        unexplained: those of `unused` that no list of known parts has.
    """

    missing: list[str]
    random_names: list[str]
    other_sizes: dict[str, str]
    other_classifier_sizes: dict[str, str]
    unused: list[str]
    unexplained: list[str]


def _compare(
    model: nn.Module, tensors: State, unused: Sequence[str], converted: Collection[str]
) -> _Comparison:
    """Return what the weights lack, have in another size, or have beside the model's tensors.

    Args:
        model: the model.
        tensors: the weights under the model's names.
        unused: the file's names inside the prefix that became nothing of the model's.
        converted: all names after the conversion, the model's or not.
    """
    model_state = model.state_dict()
    heads = classifier_names(model)
    other_sizes: dict[str, str] = {}
    other_classifier_sizes: dict[str, str] = {}
    for name, x in tensors.items():
        expected_shape = model_state[name].shape
        if x.shape != expected_shape:
            text = f"{name} {tuple(x.shape)} for {tuple(expected_shape)}"
            sizes = other_classifier_sizes if name.startswith(heads) else other_sizes
            sizes[name] = text

    # torch's own strict loading does without these counters, too: nothing computes with them.
    absent = [
        name
        for name in model_state
        if name not in tensors and name.rpartition(".")[2] != "num_batches_tracked"
    ]
    random_names = [
        name for name in model_state if name in absent or name in other_classifier_sizes
    ]

    buffers = {name for name, _ in model.named_buffers()}
    unused = [
        name
        for name in unused
        if name not in buffers and name.split(".")[-1] not in FIXED_TABLES
    ]
    children = {name for name, _ in model.named_children()}
    unexplained = []
    for name in unknown(unused):
        # A conversion may drop whole parts of a publication (the text tower), but nothing of the
        # model's own blocks.
        is_dropped = name not in converted and name.split(".")[0] not in children
        if not is_dropped and not name.startswith(heads):
            unexplained.append(name)
    return _Comparison(
        missing=[name for name in absent if not name.startswith(heads)],
        random_names=random_names,
        other_sizes=other_sizes,
        other_classifier_sizes=other_classifier_sizes,
        unused=unused,
        unexplained=unexplained,
    )


def _part_name(name: str) -> str:
    """Return the word that names a copy or a part of a model in a file: the first word that is not
    a wrapper's."""
    words = [word for word in without_wrappers(name.split(".")) if word != "model"]
    return words[0] if words else name

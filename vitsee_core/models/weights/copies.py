"""Which tensors of a file are the model's: one of the copies of the model in it, or a part of a
foreign layout that the library's conversion turns into the model's names."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitsee_core.models.weights.names import (
    COPY_SHARE,
    MAX_PREFIX_WORDS,
    MIN_SHARE,
    Group,
    groups_of,
    preferred_copy,
    without_wrappers,
)
from vitsee_core.models.weights.positions import no_guessed_grids

State = dict[str, Tensor]
Convert = Callable[..., Any]


def choose_copy(
    state: State, model: nn.Module, convert: Convert | None
) -> tuple[Group, list[Group]]:
    """Return the copy of the model in a file that is taken, and the other copies.

    Args:
        state: the file's tensors by name.
        model: the model, whose names are looked for.
        convert: the library's function from a file's layout to the model's.
    """
    model_names = model.state_dict().keys()
    groups = groups_of(list(state), model_names)
    if not groups or len(groups[0].names) < MIN_SHARE * len(model_names):
        # Hardly a name is the model's: perhaps all are once they are converted.
        groups = _foreign_groups(state, model, convert)
    if not groups:
        # Everything, so that the errors that follow name the file's tensors.
        words = {name: without_wrappers(name.split(".")) for name in state}
        return Group("", {".".join(cut) or name: name for name, cut in words.items()}), []
    chosen, others = preferred_copy(groups)
    return _with_unknown_names(chosen, others, state, model_names), others


def call_conversion(convert: Convert, state: State, model: nn.Module) -> State:
    """Return the state dict as the library's function converts it. Some of timm's functions take no
    model, and some ask whether layer scale has the older names (`gamma_1`)."""
    parameters = inspect.signature(convert).parameters
    converted: State
    with no_guessed_grids():
        if len(parameters) == 1:
            converted = convert(dict(state))
        elif "adapt_layer_scale" in parameters:
            has_old_names = any("gamma_1" in name for name in state)
            converted = convert(dict(state), model, adapt_layer_scale=has_old_names)
        else:
            converted = convert(dict(state), model)
    return converted


def _with_unknown_names(
    group: Group, others: Sequence[Group], state: State, model_names: Collection[str]
) -> Group:
    """Return a group with all of the file's names below its prefix, also those that the model
    lacks: whether these may be left over is decided later."""
    model_words = {word for name in model_names for word in name.split(".")}
    prefix = without_wrappers(group.prefix.split("."), model_words)
    names_of_others = {name for other in others for name in other.names.values()}
    other_prefixes = [
        without_wrappers(other.prefix.split("."), model_words) for other in others
    ]
    names = dict(group.names)
    for name in state:
        words = without_wrappers(name.split("."), model_words)
        clean_name = ".".join(words[len(prefix) :])
        is_below = words[: len(prefix)] == prefix and clean_name != ""
        in_other_copy = name in names_of_others or any(
            other and words[: len(other)] == other for other in other_prefixes
        )
        if is_below and not in_other_copy:
            names.setdefault(clean_name, name)
    return Group(group.prefix, names)


def _foreign_groups(
    state: State, model: nn.Module, convert: Convert | None
) -> list[Group]:
    """Return the groups of a file in another layout, which has the model's names only once it is
    converted: a group for each prefix before the layout's own names.

    The conversion is tried on the names below each likely prefix; the prefixes that give most of
    the model's names are the copies.
    """
    name_in_file: dict[str, str] = {}
    for name in state:
        words = without_wrappers(name.split("."))
        if not words or ".".join(words) in name_in_file:
            return []  # copies that wrappers' words alone tell apart
        name_in_file[".".join(words)] = name

    groups: list[Group] = []
    n_model_names: list[int] = []  # of each group, once it is converted
    for prefix in sorted(_common_prefixes(name_in_file), key=len):
        names = {
            name.removeprefix(prefix): original
            for name, original in name_in_file.items()
            if name.startswith(prefix)
        }
        stored = {clean: state[name] for clean, name in names.items()}
        groups.append(Group(prefix, names))
        n_model_names.append(_n_converted_names(stored, model, convert))
    max_names = max(n_model_names, default=0)
    if not max_names:
        return [group for group in groups if not group.prefix]

    copies: list[Group] = []
    for group, n_names in zip(groups, n_model_names, strict=True):
        # Shorter prefixes came first: `visual.` of CLIP's layout is a part of it, not a prefix.
        is_inside = any(group.prefix.startswith(copy.prefix) for copy in copies)
        if n_names >= COPY_SHARE * max_names and not is_inside:
            copies.append(group)
    return copies


def _common_prefixes(names: Collection[str]) -> list[str]:
    """Return the prefixes ("", or words with a dot at the end) of a fair share of the names."""
    prefixes = {""}
    for name in names:
        words = name.split(".")
        for n in range(1, min(len(words), MAX_PREFIX_WORDS)):
            prefixes.add(".".join(words[:n]) + ".")
    counts = Counter(
        {prefix: sum(name.startswith(prefix) for name in names) for prefix in prefixes}
    )
    return [prefix for prefix, n in counts.items() if n >= MIN_SHARE * len(names)]


def _n_converted_names(
    stored: Mapping[str, Tensor], model: nn.Module, convert: Convert | None
) -> int:
    """Return how many of the model's names a conversion of these tensors gives."""
    if convert is None:
        return 0
    try:
        converted = call_conversion(convert, dict(stored), model)
    except Exception:
        # Not this layout; whatever is wrong shows when the chosen prefix is converted.
        return 0
    model_names = model.state_dict().keys()
    return sum(name in model_names for name in converted)

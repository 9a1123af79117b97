"""Weights of transformers' models: loaded by the library, which knows its own older names, and
judged by the rule that holds for every source (`weights/fitting.py`).

The library itself leaves what it does not find random, with a warning, and drops what it has no use
for: names below a training loop's prefix, layers that the configuration does not have.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import quiet
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.fitting import (
    classifier_names,
    require_fit,
    stored_type_problem,
)
from vitsee_core.models.weights.left_over import (
    FIXED_TABLES,
    is_known,
    is_known_beside,
    unknown,
)
from vitsee_core.models.weights.names import (
    COPY_SHARE,
    Group,
    groups_of,
    preferred_copy,
    unchunked,
    without_wrappers,
)

FileOf = Callable[[str], str | None]
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
EXPECTED = (
    "expected a folder or repository whose config.json and weights belong together, all "
    "but the classifier (random weights are --random-init SEED)"
)
SIZE_KEYS = ("image_size", "crop_size")  # of a configuration
# Arguments that have options of their own.
_OWN_OPTIONS = ("img_size", "frames")
# Types of floats as safetensors calls them.
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class LoadedWeights(NamedTuple):
    """A module with its checkpoint's weights, and how far they are the module's.

    Attributes:
        module: the module.
        missing: the classifier's tensors that keep their random values.
        left_over: the checkpoint's tensors without use.
        copies: other copies of the model in the checkpoint.
    """

    module: nn.Module
    missing: list[str]
    left_over: list[str]
    copies: list[str]


class _LoadReport(NamedTuple):
    """The names that `from_pretrained` reports.

    mismatched: name -> "NAME (shape) for (shape)".
    """

    missing: list[str]
    mismatched: dict[str, str]
    left_over: list[str]


def load_whole(
    load: Callable[[dict[str, Tensor] | None], tuple[nn.Module, dict[str, Any]]],
    file_of: FileOf,
    who: str,
    *,
    tower: str = "",
    base_names: Callable[[], Collection[str]] | None = None,
    expected: str = EXPECTED,
) -> LoadedWeights:
    """Load a checkpoint with `from_pretrained`, and refuse it where it is not the model's.

    Args:
        load: calls `from_pretrained`, with a state dict in place of the checkpoint's, or with None;
            returns the module and the library's report.
        file_of: returns the local path of a file of the checkpoint, None if there is none.
        who: the model, as error messages call it.
        tower: path of the only module that is used, "" for all of it.
        base_names: returns the tensor names of the class that the checkpoint was saved from, whose
            task's layers may be left over.
        expected: the end of error messages, what to do instead.

    Raises:
        ModelError: the weights are not the model's.
    """
    paths = weight_files(file_of)
    # Before loading: the library would turn integers into floats without a word.
    require_floats(stored_types(paths), who)
    with quiet():
        module, info = load(None)
    copies: list[str] = []
    # The library does not know the prefixes of training loops: such files are loaded once more,
    # under the names that it knows.
    if _may_need_cutting(module, info, tower):
        state, copies = _cut_state(module, paths, who, base_names, expected)
        if state is not None:
            with quiet():
                module, info = load(state)
    missing, left_over = require_loaded(
        module, info, who, tower=tower, base_names=base_names, expected=expected
    )
    return LoadedWeights(module, missing, left_over, copies)


def with_arguments(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a model's name, for messages, with the user's entries of its configuration."""
    entries = _entries(arguments)
    return f"{name} with {entries}" if entries else name


def expected_with(arguments: Mapping[str, Any]) -> str:
    """Return what to do where weights do not fit a model with these arguments."""
    entries = _entries(arguments)
    if not entries:
        return EXPECTED
    size = ""
    if any(key.rpartition(".")[2] in SIZE_KEYS for key in arguments):
        size = " (images of another size are --img-size SIZE)"
    return (
        f"weights are for the model's own configuration: leave out {entries}{size}, or give "
        "--random-init SEED"
    )


def _entries(arguments: Mapping[str, Any]) -> str:
    """Return `KEY=VALUE, KEY=VALUE` for entries of a configuration, "" for none."""
    return ", ".join(
        f"{key}={value}" for key, value in arguments.items() if key not in _OWN_OPTIONS
    )


def renamed_by_library(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict under the names of a model of transformers, as `from_pretrained` converts
    names and layouts of the library's older versions.

    What the module lacks keeps its name. A state dict that has all of the module's names is
    returned as it is.

    Args:
        state: the file's tensors, without what wrappers put before their names.
        module: a `PreTrainedModel`; nothing is loaded into it.
    """
    names = module.state_dict().keys()
    if names <= state.keys():
        return state
    model_class: Any = type(module)
    # In one thread, so that each result can be traced to the file's tensors (`Origins`).
    with (
        quiet(),
        torch.random.fork_rng(devices=[]),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
    ):
        loaded, info = model_class.from_pretrained(
            None,
            config=copy.deepcopy(module.config),
            state_dict=dict(state),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    report = _load_report(info, tower="")
    random = {*report.missing, *report.mismatched}
    loaded_state: dict[str, Tensor] = loaded.state_dict(keep_vars=True)
    converted = {name: x for name, x in state.items() if name not in names}
    converted |= {name: x for name, x in loaded_state.items() if name not in random}
    prefix = f"{module.base_model_prefix}."
    for name in report.mismatched:
        # The library adds and cuts the prefix of the base model.
        stored_names = (name, f"{prefix}{name}", name.removeprefix(prefix))
        for stored_name in stored_names:
            if stored_name in state:
                converted[name] = state[stored_name]
    return converted


def weight_files(file_of: FileOf) -> list[str]:
    """Return the local paths of a checkpoint's files of weights, in the order in which transformers
    looks for them: the first format that there is.

    Raises:
        ModelError: the index of a checkpoint in several files is damaged.
    """
    for name in SINGLE_FILES:
        index = file_of(f"{name}.index.json")
        if index is not None:
            try:
                shards = json.loads(Path(index).read_text("utf-8"))["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index} is not an index of shards: {error!r}"
                ) from error
            shard_paths = [file_of(shard) for shard in sorted({*shards})]
            return [path for path in shard_paths if path is not None]
        path = file_of(name)
        if path is not None:
            return [path]
    return []


def stored_types(paths: Sequence[str]) -> dict[str, str]:
    """Return name -> stored type, as safetensors calls it, of the tensors that do not hold floats.

    Files that cannot be read are passed over: loading them gives the better error.
    """
    from safetensors import safe_open

    types: dict[str, str] = {}
    for path in paths:
        if path.endswith(".safetensors"):
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safe_open is not iterable
                    types[name] = str(tensors.get_slice(name).get_dtype())
            continue
        try:
            # On the meta device no values are read.
            content = torch.load(path, map_location="meta", weights_only=True)
        except Exception:
            continue
        if isinstance(content, Mapping):
            for name, x in content.items():
                if isinstance(x, Tensor) and (
                    x.is_quantized or not x.is_floating_point()
                ):
                    types[str(name)] = str(x.dtype).removeprefix("torch.")
    return {name: kind for name, kind in types.items() if not kind.startswith(_FLOATS)}


def require_floats(types: Mapping[str, str], who: str) -> None:
    """Refuse integers and complex numbers in place of float weights.

    Args:
        types: name -> stored type, from `stored_types`.
        who: the model, as the message calls it.

    Raises:
        ModelError: names the first.
    """
    for name, kind in types.items():
        may_be_integer = name.split(".")[-1] in FIXED_TABLES or is_known(name)
        if not may_be_integer:
            raise ModelError(stored_type_problem(who, name, kind))


def require_loaded(
    module: nn.Module,
    info: Mapping[str, Any],
    who: str,
    *,
    tower: str = "",
    base_names: Callable[[], Collection[str]] | None = None,
    expected: str = EXPECTED,
) -> tuple[list[str], list[str]]:
    """Return the classifier's tensors that are random, and the checkpoint's tensors without use.

    Args:
        module: the module after `from_pretrained`.
        info: what `from_pretrained` reported.
        who: the model, as error messages call it.
        tower: path of the only module that is used, "" for all of it.
        base_names: returns the tensor names of the class that the checkpoint was saved from.
        expected: the end of error messages, what to do instead.

    Raises:
        ModelError: other tensors are random, of another size, or without use.
    """
    report = _load_report(info, tower)
    heads = classifier_names(module)
    strange = [
        name for name in report.left_over if not _may_be_left_over(name, module, heads)
    ]
    if strange and base_names is not None:
        # Layers of the class that was saved, beside the model that is used of it.
        names_of_saved_class = base_names()
        strange = [name for name in strange if name not in names_of_saved_class]
    require_fit(
        who,
        missing=[name for name in report.missing if not name.startswith(heads)],
        sizes=[
            text for name, text in report.mismatched.items() if not name.startswith(heads)
        ],
        left_over=strange,
        expected=expected,
    )
    return sorted({*report.missing, *report.mismatched}), report.left_over


def _load_report(info: Mapping[str, Any], tower: str) -> _LoadReport:
    """Return the names that `from_pretrained` reports; for a tower those below its path."""
    missing = sorted(map(str, info.get("missing_keys", ())))
    left_over = sorted(map(str, info.get("unexpected_keys", ())))
    mismatched = {
        str(name): f"{name} {tuple(stored)} for {tuple(expected)}"
        for name, stored, expected in info.get("mismatched_keys", ())
    }
    if tower:
        # The library reports names with and without the base model's prefix.
        prefixes = (f"{tower}.", f"{tower.removeprefix('model.')}.")
        missing = [name for name in missing if name.startswith(prefixes)]
        mismatched = {
            name: text for name, text in mismatched.items() if name.startswith(prefixes)
        }
        left_over = [
            name
            for name in left_over
            if any(f".{prefix}" in f".{name}" for prefix in prefixes)
        ]
    # Counters compute nothing; tables follow from the configuration.
    missing = [name for name in missing if name.split(".")[-1] not in FIXED_TABLES]
    return _LoadReport(missing, mismatched, left_over)


def _may_be_left_over(name: str, module: nn.Module, heads: tuple[str, ...]) -> bool:
    """Return whether a tensor of the checkpoint may be without use: it is the classifier's, or
    known to stand beside a model or in another task's model."""
    if name.startswith(heads) or is_known(name):
        return True
    base_prefix = getattr(module, "base_model_prefix", "")
    is_base_model = base_prefix != "" and not hasattr(module, base_prefix)
    # Inside the model's own prefix a name is judged by what stands behind it.
    if is_base_model and name.startswith(f"{base_prefix}."):
        return is_known(name.removeprefix(f"{base_prefix}."))
    if any(name.startswith(f"{child}.") for child, _ in module.named_children()):
        return False
    return is_known_beside(name, [base_prefix] if is_base_model else [])


def _may_need_cutting(module: nn.Module, info: Mapping[str, Any], tower: str) -> bool:
    """Return whether names of the checkpoint may have a prefix that hides them from the library:
    something is missing or strange."""
    report = _load_report(info, tower)
    heads = classifier_names(module)
    has_strange = any(
        not _may_be_left_over(name, module, heads) for name in report.left_over
    )
    return has_strange or any(not name.startswith(heads) for name in report.missing)


def _cut_state(
    module: nn.Module,
    paths: Sequence[str],
    who: str,
    base_names: Callable[[], Collection[str]] | None,
    expected: str,
) -> tuple[dict[str, Tensor] | None, list[str]]:
    """Return the checkpoint's tensors without wrappers' words and without what stands before the
    model's names (None where nothing can be cut), and the labels of other copies of the model.

    Raises:
        ModelError: beside the model there are tensors that may not be left over.
    """
    state: dict[str, Tensor] = {}
    for path in paths:
        content = read_file(Path(path))
        if isinstance(content, Mapping):
            for name, x in content.items():
                if isinstance(x, Tensor):
                    state[str(name)] = x
    groups = _library_groups(module, state)
    if not groups:
        return None, []
    chosen, others = preferred_copy(groups)
    labels = [copy.label or "(no prefix)" for copy in others]
    is_uncut = all(cut == name for cut, name in chosen.names.items())
    if is_uncut and len(chosen.names) == len(state):
        return None, labels
    names_beside = sorted(state.keys() - set(chosen.names.values()))
    strange = unknown(names_beside, [chosen.label, *(copy.label for copy in others)])
    if strange and base_names is not None:
        names_of_saved_class = base_names()
        strange = [
            name
            for name in strange
            if ".".join(without_wrappers(name.split("."))) not in names_of_saved_class
        ]
    require_fit(who, left_over=strange, expected=expected)
    return {cut: state[name] for cut, name in chosen.names.items()}, labels


def _library_groups(module: nn.Module, state: Mapping[str, Tensor]) -> list[Group]:
    """Return the file's names by the prefix before names that the library may know, the fullest
    group first.

    The library also knows names of its older versions, which are not the model's. So each prefix
    that hides most of the model's names brings all names below it.
    """
    model_names = set(module.state_dict())
    base_prefix = getattr(module, "base_model_prefix", "")
    if base_prefix:
        model_names |= {name.removeprefix(f"{base_prefix}.") for name in model_names}
    renamed = unchunked(list(state), model_names)
    original_names = {new: old for old, new in renamed.items()}
    groups = groups_of(list(original_names), model_names)
    raw_prefixes = {
        group.label: group.prefix
        for group in groups
        if len(group.names) >= COPY_SHARE * len(groups[0].names)
    }
    complete: list[Group] = []
    for label, raw_prefix in raw_prefixes.items():
        prefix = label.split(".") if label else []
        # `ema.x` is below no prefix, too, but belongs to another copy.
        longer_prefixes = [
            longer.split(".") for longer in raw_prefixes if len(longer) > len(label)
        ]
        names: dict[str, str] = {}
        for name, original in original_names.items():
            words = without_wrappers(name.split("."))
            if any(words[: len(longer)] == longer for longer in longer_prefixes):
                continue
            if words[: len(prefix)] == prefix and len(words) > len(prefix):
                names[".".join(words[len(prefix) :])] = original
        complete.append(Group(raw_prefix, names))
    return sorted(complete, key=lambda group: -len(group.names))

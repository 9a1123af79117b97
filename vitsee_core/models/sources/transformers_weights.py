"""Weights of transformers' models: loaded by the library, which knows its own older names, and
judged by the rule that holds for every source (`weights/fitting.py`).

The library itself leaves what it does not find random, with a warning, and drops what it has no use
for: names below a training loop's prefix, layers that the configuration does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    copy_rank,
    groups_of,
    unchunked,
    without_wrappers,
)

FileOf = Callable[[str], str | None]
WHOLE = ("model.safetensors", "pytorch_model.bin")
EXPECTED = (
    "expected a folder or repository whose config.json and weights belong together, all but the "
    "classifier (random weights are --random-init SEED)"
)
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # of safetensors


def weight_files(file_of: FileOf) -> list[str]:
    """Local paths of a checkpoint's files of weights, those that transformers reads."""
    for name in WHOLE:
        if (index := file_of(f"{name}.index.json")) is not None:
            try:
                shards = json.loads(Path(index).read_text("utf-8"))["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index} is not an index of shards: {error!r}"
                ) from error
            return [
                path
                for shard in sorted({*shards})
                if (path := file_of(shard)) is not None
            ]
        if (path := file_of(name)) is not None:
            return [path]
    return []


def stored_types(paths: Sequence[str]) -> dict[str, str]:
    """Name -> the type in which a checkpoint's tensors are stored, as safetensors call it, of those
    that hold no floats; files that cannot be read are left to their loading."""
    from safetensors import safe_open

    types: dict[str, str] = {}
    for path in paths:
        if path.endswith(".safetensors"):
            with safe_open(path, "pt") as tensors:
                names = list(tensors.keys())
                types |= {
                    name: str(tensors.get_slice(name).get_dtype()) for name in names
                }
            continue
        try:
            content = torch.load(
                path, map_location="meta", weights_only=True
            )  # no values read
        except Exception:
            continue
        if isinstance(content, Mapping):
            tensors_of_file = {n: x for n, x in content.items() if isinstance(x, Tensor)}
            types |= {
                str(name): str(x.dtype).removeprefix("torch.")
                for name, x in tensors_of_file.items()
                if x.is_quantized or not x.is_floating_point()
            }
    return {name: kind for name, kind in types.items() if not kind.startswith(_FLOATS)}


def load_whole(
    load: Callable[[dict[str, Tensor] | None], tuple[nn.Module, dict[str, Any]]],
    file_of: FileOf,
    who: str,
    *,
    part: str = "",
    base_names: Callable[[], Collection[str]] | None = None,
) -> tuple[nn.Module, list[str], list[str], list[str]]:
    """The module that `load` gives with its weights, the classifier's tensors that are random, the
    checkpoint's tensors without use, and other copies of the model in it.

    Args:
        load: calls `from_pretrained`, with a state dict in place of the checkpoint's, or without.
        file_of: the local path of a file of the checkpoint, None if there is none.
        who: the model, in messages.
        part: path of the only part that is used, "" for all of it.
        base_names: the tensor names of the class that the checkpoint was saved from, whose task's
            own layers may be left over.

    Raises:
        ModelError: the weights are not the model's.
    """
    paths = weight_files(file_of)
    require_floats(stored_types(paths), who)
    with quiet():
        module, info = load(None)
    copies: list[str] = []
    if _lacks(module, info, part):
        state, copies = _cut(module, paths, who, base_names)
        if state is not None:
            with quiet():
                module, info = load(state)
    missing, left_over = judge(module, info, who, part=part, base_names=base_names)
    return module, missing, left_over, copies


def require_floats(types: Mapping[str, str], who: str) -> None:
    """Refuse integers and complex numbers in place of float weights. types: of `stored_types`.

    Raises:
        ModelError: names the first.
    """
    for name, kind in types.items():
        fixed = name.split(".")[-1] in FIXED_TABLES or is_known(name)
        if not fixed:
            raise ModelError(stored_type_problem(who, name, kind))


def judge(
    module: nn.Module,
    info: Mapping[str, Any],
    who: str,
    *,
    part: str = "",
    base_names: Callable[[], Collection[str]] | None = None,
) -> tuple[list[str], list[str]]:
    """The classifier's tensors that are random, and the checkpoint's without use, by what
    `from_pretrained` reports.

    Raises:
        ModelError: other tensors are random, of another size, or without use.
    """
    missing, mismatched, left_over = _reported(module, info, part)
    heads = classifier_names(module)
    strange = [name for name in left_over if not _may_be_left(name, module, heads)]
    if strange and base_names is not None:
        # Layers of the class that was saved, beside the model that is used of it.
        others = base_names()
        strange = [name for name in strange if name not in others]
    require_fit(
        who,
        missing=[name for name in missing if not name.startswith(heads)],
        sizes=[text for name, text in mismatched.items() if not name.startswith(heads)],
        left_over=strange,
        expected=EXPECTED,
    )
    return sorted({*missing, *mismatched}), left_over


def _reported(
    module: nn.Module, info: Mapping[str, Any], part: str
) -> tuple[list[str], dict[str, str], list[str]]:
    missing = sorted(map(str, info.get("missing_keys", ())))
    left_over = sorted(map(str, info.get("unexpected_keys", ())))
    mismatched = {
        str(name): f"{name} {tuple(stored)} for {tuple(own)}"
        for name, stored, own in info.get("mismatched_keys", ())
    }
    if part:
        ends = (f"{part}.", f"{part.removeprefix('model.')}.")
        inside = [name for name in {*missing, *mismatched} if name.startswith(ends)]
        missing = [name for name in missing if name in inside]
        mismatched = {name: text for name, text in mismatched.items() if name in inside}
        left_over = [
            name for name in left_over if any(f".{end}" in f".{name}" for end in ends)
        ]
    # Counters compute nothing; tables follow from the configuration.
    missing = [name for name in missing if name.split(".")[-1] not in FIXED_TABLES]
    return missing, mismatched, left_over


def _may_be_left(name: str, module: nn.Module, heads: tuple[str, ...]) -> bool:
    if name.startswith(heads) or is_known(name):
        return True
    base = getattr(module, "base_model_prefix", "")
    prefixes = [base] if base and not hasattr(module, base) else []
    # Inside the model's own prefix a name is judged by what stands behind it.
    if prefixes and name.startswith(f"{base}."):
        return is_known(name.removeprefix(f"{base}."))
    if any(name.startswith(f"{child}.") for child, _ in module.named_children()):
        return False
    return is_known_beside(name, prefixes)


def _lacks(module: nn.Module, info: Mapping[str, Any], part: str) -> bool:
    """Whether names of the checkpoint may have to be cut: something is missing or strange."""
    missing, _, left_over = _reported(module, info, part)
    heads = classifier_names(module)
    strange = any(not _may_be_left(name, module, heads) for name in left_over)
    return strange or any(not name.startswith(heads) for name in missing)


def _cut(
    module: nn.Module,
    paths: Sequence[str],
    who: str,
    base_names: Callable[[], Collection[str]] | None,
) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The checkpoint's tensors without wrappers' words and without what stands before the model's
    names, and other copies of the model in it; None where nothing can be cut.

    Raises:
        ModelError: beside the model there are tensors that may not be left over.
    """
    state: dict[str, Tensor] = {}
    for path in paths:
        content = read_file(Path(path))
        if isinstance(content, Mapping):
            state |= {
                str(name): x for name, x in content.items() if isinstance(x, Tensor)
            }
    groups = _groups(module, state)
    if not groups:
        return None, []
    most = len(groups[0].names)
    copies = [group for group in groups if len(group.names) >= COPY_SHARE * most]
    chosen = min(copies, key=lambda group: (copy_rank(group.prefix), len(group.prefix)))
    others = [group for group in copies if group is not chosen]
    names = chosen.names
    labels = [other.label or "(no prefix)" for other in others]
    if all(cut == name for cut, name in names.items()) and len(names) == len(state):
        return None, labels
    beside = state.keys() - set(names.values())
    strange = unknown(sorted(beside), [chosen.label, *(other.label for other in others)])
    if strange and base_names is not None:
        of_task = base_names()
        cut_names = {
            name: ".".join(without_wrappers(name.split("."))) for name in strange
        }
        strange = [name for name in strange if cut_names[name] not in of_task]
    require_fit(who, left_over=strange, expected=EXPECTED)
    return {cut: state[name] for cut, name in names.items()}, labels


def _groups(module: nn.Module, state: Mapping[str, Tensor]) -> list[Group]:
    """The file's tensors by the prefix before names that the model, or its library's older
    versions, may have: those that share their endings with the model's."""
    own = set(module.state_dict())
    base = getattr(module, "base_model_prefix", "")
    own |= {name.removeprefix(f"{base}.") for name in own if base}
    renamed = unchunked(list(state), own)
    back = {new: old for old, new in renamed.items()}
    found = groups_of(list(back), own)
    likely = [
        group for group in found if len(group.names) >= COPY_SHARE * len(found[0].names)
    ]
    labels = {group.label: group.prefix for group in likely}
    complete: list[Group] = []
    for label, raw in labels.items():
        words = label.split(".") if label else []
        names: dict[str, str] = {}
        for name in back:
            cut = without_wrappers(name.split("."))
            # `ema.x` is below no prefix, too, but another copy's.
            longer = (other.split(".") for other in labels if len(other) > len(label))
            if any(cut[: len(other)] == other for other in longer):
                continue
            if cut[: len(words)] == words and len(cut) > len(words):
                names[".".join(cut[len(words) :])] = back[name]
        complete.append(Group(raw, names))
    return sorted(complete, key=lambda group: -len(group.names))

"""Weights from a checkpoint file: which tensors in it are the model's, and do they fit.

Files of DINO, MoCo-v3, MAE, CLIP, BEiT, of training loops that wrap the model, and timm's own
differ in the key of the tensors and in the prefix of their names. Both are found from the
model's own tensor names; renaming and resampling of position tables is the source's.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitsee_core.models.checkpoint_files import read_file
from vitsee_core.models.checkpoint_layouts import Layout, recognise
from vitsee_core.models.head import classifiers
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import some

# Which of several state dicts in a file, or of several copies of the model in one, is taken: the
# one its authors evaluate. Averaged weights (EMA) are taken only where a file has nothing else.
KEY_ORDER = ("state_dict", "model", "model_state_dict", "teacher", "student", "encoder")
COPY_ORDER = ("teacher", "base_encoder", "student", "momentum_encoder")

State = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file, before they are a model's.

    key: of the file's state dict, "" if the file is that itself. others: keys of the others.
    layout: of a known publication, which says how its images are prepared; None for other files.
    """

    path: Path
    key: str
    state: State
    others: list[str]
    layout: Layout | None

    @classmethod
    def read(cls, path: Path, key: str | None = None) -> Checkpoint:
        """`key`, or `FILE#KEY`, names which of a file's state dicts to take.

        Raises:
            ModelError: an unreadable file, or none of these weights in it.
        """
        path, in_name = _split_key(Path(path))
        content = read_file(path)
        found, state, others = _state_dict(content, key if key is not None else in_name, path)
        whole = {str(name): x for name, x in content.items()}
        layout = recognise(whole, found, whole[found] if found else whole)
        return cls(path, found, state, others, layout)

    def put_into(
        self, model: nn.Module, convert: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Load the weights; only the classifier may be missing, and the counters of batches that
        older files lack. convert: see `Source.converter`.

        Comes back: file, key, other_keys, prefix (cut from the names), missing (the model's tensors
        that keep their random values), unexpected (the file's tensors that the model has no use
        for, those under another prefix summed up as "prefix.* (n)") and, where there are any,
        resampled (tensors of another size in the file, position tables above all).

        Raises:
            ModelError: the weights do not fit; names what is missing or left over.
        """
        model_keys = set(model.state_dict())
        prefix = _prefix(self.state, model_keys)
        kept = {name[len(prefix) :]: x for name, x in self.state.items() if name.startswith(prefix)}
        others = [name for name in self.state if prefix and not name.startswith(prefix)]
        filtered = _filtered(model, kept, self.path, convert)
        missing, unexpected = _fit(model, filtered, self.path)
        renamed = not set(kept) & set(filtered)
        unexpected += [name for name in kept if not renamed and name not in filtered]
        unexpected += [f"{top}.* ({n})" for top, n in Counter(map(_top, others)).items()]
        resampled = _resampled(kept, filtered)
        return {
            "file": self.path.name,
            "key": self.key,
            "other_keys": self.others,
            "prefix": prefix,
            "missing": missing,
            "unexpected": unexpected,
            **({"resampled": resampled} if resampled else {}),
        }


def _split_key(path: Path) -> tuple[Path, str | None]:
    if "#" in path.name and not path.exists():
        file, _, key = path.name.rpartition("#")
        return path.with_name(file), key
    return path, None


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and sum(isinstance(x, Tensor) for x in value.values()) > len(value) / 2
    )


def _state_dict(content: Any, wanted: str | None, path: Path) -> tuple[str, State, list[str]]:
    """Key, tensors, and the keys of the other state dicts in the file."""
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a dict of tensors")
    found = {str(key): value for key, value in content.items() if _is_state(value)}
    if wanted is not None and wanted not in found:
        held = ", ".join(found) or "none"
        if _is_state(content) and not found:
            raise ModelError(f"{path} is itself one state dict: leave out --checkpoint-key")
        raise ModelError(
            f"{path} has no state dict under {wanted!r} (--checkpoint-key); it has: {held}"
        )
    if wanted is None and _is_state(content) and not found:
        return "", {str(k): x for k, x in content.items() if isinstance(x, Tensor)}, []
    if not found:
        held = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise ModelError(f"{path} holds no state dict; its keys are: {held}")
    names = sorted(found, key=lambda key: ("ema" in key.lower(), _place(key, KEY_ORDER)))
    key = wanted or names[0]
    tensors = {str(k): x for k, x in found[key].items() if isinstance(x, Tensor)}
    return key, tensors, [name for name in found if name != key]


def _place(name: str, order: tuple[str, ...]) -> int:
    return next((i for i, word in enumerate(order) if word in name), len(order))


def _top(name: str) -> str:
    """The word that names a copy or a part of a model in a file: the first that is no wrapper."""
    words = [word for word in name.split(".") if word not in ("module", "_orig_mod", "model")]
    return words[0] if words else name


def _prefix(state: State, model_keys: set[str]) -> str:
    """The prefix under which most of the model's own tensor names are found in the file."""
    counts: Counter[str] = Counter()
    for name in state:
        words = name.split(".")
        for n in range(len(words)):
            if ".".join(words[n:]) in model_keys:
                counts[".".join(words[:n]) + "." * bool(n)] += 1
                break
    # Foreign names (raw CLIP): only wrappers around everything can be recognised.
    wrapped = next(
        (p for p in ("module.", "_orig_mod.") if all(k.startswith(p) for k in state)), ""
    )
    if not counts or counts.most_common(1)[0][1] < len(model_keys) / 4:
        return wrapped
    most = max(counts.values())
    best = [prefix for prefix, n in counts.items() if n >= 0.9 * most]
    return min(best, key=lambda prefix: (_place(prefix, COPY_ORDER), len(prefix)))


def _filtered(
    model: nn.Module, state: State, path: Path, convert: Callable[..., Any] | None
) -> State:
    if convert is None:
        return dict(state)
    given: dict[str, Any] = {}
    if "adapt_layer_scale" in inspect.signature(convert).parameters:
        given["adapt_layer_scale"] = any("gamma_1" in name for name in state)
    try:
        converted: State = convert(dict(state), model, **given)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{path} cannot be converted for this model ({type(error).__name__}: {text}); "
            "expected weights of the same architecture"
        ) from error
    return {name: x for name, x in converted.items() if isinstance(x, Tensor)}


def _resampled(before: State, after: State) -> list[str]:
    """Tensors that the conversion gave another size, as "NAME (shape) to (shape)"."""
    counts = {x.numel() for name, x in before.items() if "pos" in name}
    found = []
    for name, x in after.items():
        if name in before:
            if before[name].numel() != x.numel():
                found.append(f"{name} {tuple(before[name].shape)} to {tuple(x.shape)}")
        elif "pos" in name and x.numel() not in counts:
            found.append(f"{name} to {tuple(x.shape)}")
    return found


def _fit(model: nn.Module, state: State, path: Path) -> tuple[list[str], list[str]]:
    """Load; what the model lacks (its classifier at most) and what it has no use for."""
    own = model.state_dict()
    names = {id(module): name for name, module in model.named_modules()}
    heads = tuple(f"{names[id(m)]}." for m in classifiers(model) if id(m) in names)
    sizes = {
        name: f"{tuple(x.shape)} for {tuple(own[name].shape)}"
        for name, x in state.items()
        if name in own and x.shape != own[name].shape
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if not name.startswith(heads)]
    # What torch's own strict loading does without, too: nothing computes with it.
    counters = {name for name in own if name.rpartition(".")[2] == "num_batches_tracked"}
    missing = [name for name in own if name in sizes or name not in {*state, *counters}]
    lacking = [name for name in missing if not name.startswith(heads)]
    buffers = {name for name, _ in model.named_buffers()}
    extra = [name for name in state if name not in own and name not in buffers]
    inside = {name.partition(".")[0] for name, _ in model.named_parameters()}
    alien = [x for x in extra if x.partition(".")[0] in inside and not x.startswith(heads)]
    if lacking or odd or alien:
        problems = [
            f"{what} {len(found)} ({some(found)})"
            for what, found in (
                ("missing:", [n for n in lacking if n not in sizes]),
                ("of another size:", odd),
                ("left over:", alien or (extra if lacking else [])),
            )
            if found
        ]
        raise ModelError(
            f"{path} does not fit this model: {'; '.join(problems)}; expected all but the "
            "classifier: try another MODEL or --model-arg"
        )
    fitting = {name: x for name, x in state.items() if name in own and name not in sizes}
    model.load_state_dict(fitting, strict=False)
    return missing, extra + [f"{name} {size}" for name, size in sizes.items()]

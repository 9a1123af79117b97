"""timm's create_model with errors of one line, at the right moment: arguments are tried without
weights before any are loaded, and weights come from this machine, or from a network that answers.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.sources.base import Unfilled, near_names, one_line
from vitsee_core.models.sources.meta_device import meta_device
from vitsee_core.models.sources.path_hints import path_hint
from vitsee_core.models.sources.timm_weights import by_the_rule
from vitsee_core.models.sources.transforms import checked_size
from vitsee_core.models.survey.structure import classifier_prefixes
from vitsee_core.models.weights.fitting import Fit
from vitsee_core.models.weights.positions import Resampling
from vitsee_core.runtime.machine import human_bytes, memory_bytes

HUB = ("hf-hub:", "hf_hub:")
FOLDER = "local-dir:"
PROBE_SECONDS = 5.0
log = logging.getLogger(__name__)

# What timm loads, from where and onto what; each has an option of its own here, or none.
LOADING = {
    "checkpoint_path": "use --checkpoint FILE",
    "pretrained": "use --random-init SEED for fresh weights",
    "pretrained_cfg": "use local-dir:FOLDER for weights with a configuration of their own",
    "pretrained_cfg_overlay": "use local-dir:FOLDER, --img-mean, --img-std or --crop-pct",
    "pretrained_model_args": "use local-dir:FOLDER",
    "pretrained_strict": "weights are always loaded strictly",
    "pretrained_filter_fn": "use --checkpoint FILE",
    "model_name": "it is the argument MODEL",
    "cache_dir": "set HF_HOME",
    "device": "use --device",
    "dtype": "use --precision",
    "scriptable": "hooks see nothing in scripted models",
    "exportable": "hooks see nothing in exported models",
    "features_only": "sites of every layer are captured anyway",
}


def refuse_loading(args: Mapping[str, Any], where: str = "--model-arg ") -> None:
    """Raise ModelError if an argument chooses what to load, not how the model is made."""
    for name in args:
        if name in LOADING:
            raise ModelError(
                f"{where}{name}={str(args[name])[:40]} is not passed on to timm: {LOADING[name]}"
            )


def create_model(
    full: str,
    name: str,
    *,
    pretrained: bool,
    seed: int,
    wanted: dict[str, Any],
    foreign: bool = False,
    resampling: Resampling | None = None,
) -> tuple[nn.Module, Fit | None]:
    """The module as in `Source.make`, and how its weights were fitted, where it has trained ones.
    full: the name as timm knows it; name: as the user knows it, for messages."""
    check_known(full, name)
    unreachable = None
    if foreign:
        unreachable = "nothing is fetched for a store (--trust-store allows it)"
    elif full.startswith(HUB) or (pretrained and not full.startswith(FOLDER)):
        unreachable = why_unreachable()
    with local_only() if unreachable else nullcontext():
        try:
            wanted = _accepted(full, wanted)
            arguments = ", ".join(f"{key}={value}" for key, value in wanted.items())
            who = f"{name} with {arguments}" if wanted else name
            fitting = by_the_rule(who, resampling or Resampling(), _size_in(full, name))
            with fitting as fits:
                module = _build(full, pretrained, seed, wanted)
            return module, fits[0] if fits else None
        except Exception as error:
            raise _explained(error, name, pretrained, wanted, unreachable) from error


def _size_in(full: str, name: str) -> tuple[int, int] | None:
    """Rows and columns of the images that a folder's weights are for, as its config.json says."""
    if not full.startswith(FOLDER):
        return None
    config = read_config(Path(full.removeprefix(FOLDER)), name)
    args = config.get("model_args")
    size = args.get("img_size") if isinstance(args, dict) else None
    if isinstance(size, int):
        return size, size
    if (
        isinstance(size, list)
        and len(size) == 2
        and all(isinstance(n, int) for n in size)
    ):
        return size[0], size[1]
    return None


def on_meta(full: str, wanted: dict[str, Any]) -> nn.Module:
    """The module without weights and without memory for them."""
    with meta_device(), Unfilled():
        return _build(full, False, 0, wanted)


def not_as_pretrained(
    module: nn.Module, full: str, wanted: dict[str, Any]
) -> dict[str, list[str]]:
    """The tensors of a module that its pretrained weights do not have as they are, because of
    arguments other than the weights': `missing`, classifier tensors left random, and `resampled`,
    "NAME (shape) to (shape)", position tables above all. Without any, {}."""
    if not wanted:
        return {}
    with local_only():
        before = {key: tuple(p.shape) for key, p in on_meta(full, {}).named_parameters()}
    heads = classifier_prefixes(module)
    changed = {
        key: (before[key], tuple(p.shape))
        for key, p in module.named_parameters()
        if key in before and before[key] != tuple(p.shape)
    }
    found = {
        "missing": [key for key in changed if key.startswith(heads)] if heads else [],
        "resampled": [
            f"{key} {old} to {new}"
            for key, (old, new) in changed.items()
            if not heads or not key.startswith(heads)
        ],
    }
    return {key: entries for key, entries in found.items() if entries}


def heads_no_shape_shows(
    module: nn.Module, full: str, wanted: dict[str, Any]
) -> int | None:
    """How many heads the blocks of a module have, where its tensors would have the same shapes with
    another number, which no checkpoint then shows; None where shapes tell, heads differ by block,
    or their number was given."""
    counts = {
        n for m in module.modules() if isinstance(n := getattr(m, "num_heads", None), int)
    }
    if len(counts) != 1 or "num_heads" in wanted:
        return None
    (heads,) = counts
    shapes = {key: x.shape for key, x in module.state_dict().items()}
    for other in (2 * heads, heads // 2):
        try:
            changed = on_meta(full, {**wanted, "num_heads": other})
        except (
            Exception
        ):  # not a number of heads that this architecture can have, or no argument
            continue
        if {key: x.shape for key, x in changed.state_dict().items()} == shapes:
            return heads
    return None


def check_known(full: str, name: str) -> None:
    """Raise ModelError unless timm knows a name, or wrote the config.json of its folder."""
    import timm

    if not full.startswith((*HUB, FOLDER)) and not timm.is_model(full):
        if hint := path_hint(name):
            raise ModelError(f"{name} {hint}")
        near = near_names(full.partition(".")[0], timm.list_models())
        raise ModelError(
            f"no timm model is called {name!r}{near} (run: vitsee models '*PART*')"
        )
    if not full.startswith(FOLDER):
        return
    folder = Path(full.removeprefix(FOLDER))
    if not folder.is_dir():
        raise ModelError(
            f"{name}: no such folder; expected one with config.json and model.safetensors"
        )
    parts = read_config(folder, name)
    architecture = parts.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ModelError(
            f"{name}: its config.json says architecture {str(architecture)[:40]!r}; expected "
            "a timm name (run: vitsee models '*PART*')"
        )
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(parts.get(key, {}), dict):
            raise ModelError(f"{name}: {key} in its config.json is no object")
    pretrained = parts.get("pretrained_cfg", parts)
    if "input_size" in pretrained:
        checked_size(pretrained["input_size"], name)
    refuse_loading(
        parts.get("model_args", {}), f"{name}: model_args of its config.json: "
    )


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A folder's config.json; {} where it is no object."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise ModelError(
            f"{name} has no config.json that can be read: {one_line(error)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{name}: its config.json is no JSON: {one_line(error)}"
        ) from error
    return config if isinstance(config, dict) else {}


def _accepted(full: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arguments without an image size that the architecture does not take."""
    if not wanted:
        return wanted
    try:
        module = on_meta(full, wanted)
    except TypeError as error:
        if "img_size" in wanted and "img_size" in str(error):
            rest = {key: x for key, x in wanted.items() if key != "img_size"}
            return _accepted(full, rest)
        raise
    except NotImplementedError:  # an architecture that cannot be made without memory
        return wanted
    need = sum(x.numel() * x.element_size() for x in module.state_dict().values())
    if need > memory_bytes():
        raise ModelError(
            f"the weights of {full} would take {human_bytes(need)}, more than the memory"
        )
    embed = getattr(module, "patch_embed", None)
    patch: Any = getattr(embed, "patch_size", None)
    size: Any = wanted.get("img_size")
    pairs = (
        isinstance(patch, tuple)
        and isinstance(size, tuple)
        and len(patch) == len(size) == 2
    )
    if pairs and (size[0] < patch[0] or size[1] < patch[1]):
        raise ModelError(
            f"--img-size {size[0]}x{size[1]} is less than one patch of {patch[0]}x{patch[1]} "
            "pixels; choose a larger one"
        )
    return wanted


def _build(full: str, pretrained: bool, seed: int, wanted: dict[str, Any]) -> nn.Module:
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = timm.create_model(full, pretrained=pretrained, **wanted)
    return module


def _explained(
    error: Exception,
    name: str,
    pretrained: bool,
    wanted: dict[str, Any],
    unreachable: str | None,
) -> Exception:
    """The error that the user is shown; the same one where it is a fault of ours."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError | NotHere):
        why = unreachable or "they cannot be fetched"
        return NotHere(
            f"the weights of {name} are not on this machine, and {why}; give --checkpoint FILE or "
            "--random-init SEED"
        )
    if isinstance(error, ModelError):
        return error
    if "weights_only" in str(error):
        return ModelError(
            f"{name} cannot be loaded: its weights hold objects besides tensors and plain values, "
            "which could run code; save the state dict alone, as .safetensors"
        )
    given = ", ".join(f"{key}={value}" for key, value in wanted.items())
    if isinstance(error, TypeError):
        return ModelError(f"{name} does not take these arguments: {one_line(error)}")
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        return ModelError(
            f"the pretrained weights of {name} do not fit {given or 'it'}: {_misfit(error)}; "
            "give --random-init SEED, or --checkpoint FILE with weights of this shape"
        )
    if isinstance(error, OSError) or "No pretrained weights" in str(error):
        hint = "; give --checkpoint FILE or --random-init SEED" if pretrained else ""
        return ModelError(f"{name} cannot be loaded: {one_line(error)}{hint}")
    if isinstance(
        error, RuntimeError | ValueError | AssertionError | KeyError | ArithmeticError
    ):
        hint = f" with {given}" if given else ""
        return ModelError(
            f"{name} cannot be made{hint}: {_check(error) or one_line(error)}"
        )
    return error


def _check(error: Exception) -> str:
    """The condition that a bare assertion of timm's asks for; "" for other errors."""
    if not isinstance(error, AssertionError) or str(error):
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if line.startswith("assert "):
        return f"timm asks for {line.removeprefix('assert ')}"
    return ""


def _misfit(error: Exception) -> str:
    """timm's list of tensors in a few words."""
    text = " ".join(str(error).split())
    parts = []
    for title, what in (("Missing", "not in them"), ("Unexpected", "left over")):
        if found := re.search(
            rf'{title} key\(s\) in state_dict: ((?:"[^"]*"(?:, )?)+)', text
        ):
            names = re.findall(r'"([^"]*)"', found[1])
            parts.append(f"{what} {len(names)} ({some(names)})")
    if sizes := re.findall(r"size mismatch for ([\w.]+):", text):
        parts.append(f"of another size {len(sizes)} ({some(sizes)})")
    return "; ".join(parts) or one_line(error)


class NotHere(ModelError):
    """Weights that this machine does not have."""


@contextmanager
def local_only() -> Iterator[None]:
    """A context in which timm uses its caches and no network.

    timm has no switch for it, so its two ways out, downloads from the hub and from an address,
    are closed where timm calls them.
    """
    import torch.hub

    hub: Any = importlib.import_module("timm.models._hub")

    def refuse(url: str, *_: Any, **__: Any) -> None:
        raise NotHere(f"{Path(str(url)).name} is not on this machine")

    cached = functools.partial(hub.hf_hub_download, local_files_only=True)
    with (
        mock.patch.object(hub, "hf_hub_download", cached),
        mock.patch.object(hub, "download_url_to_file", refuse),
        mock.patch.object(torch.hub, "download_url_to_file", refuse),
    ):
        yield


def why_unreachable() -> str | None:
    """Why the hub does not answer, found out once within seconds; None if it does.

    Without this the hub's own client retries each file for half a minute.
    """
    from huggingface_hub import constants, utils

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        session: Any = utils.get_session()  # type: ignore[attr-defined]
        session.head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:
        log.debug("%s: %s", constants.ENDPOINT, error)
        return f"{constants.ENDPOINT} does not answer: {type(error).__name__}"
    return None

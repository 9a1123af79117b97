"""timm's create_model with errors of one line.

Arguments are tried on the meta device before any weights are loaded, and weights come from this
machine, or from a network that answers.
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
from vitsee_core.models.survey.head import classifier_prefixes
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
                f"{where}{name}={str(args[name])[:40]} is not passed on to timm: "
                f"{LOADING[name]}"
            )


def create_model(
    full: str,
    name: str,
    *,
    pretrained: bool,
    seed: int,
    arguments: dict[str, Any],
    foreign: bool = False,
    resampling: Resampling | None = None,
) -> tuple[nn.Module, Fit | None]:
    """Make a module like `Source.make`.

    Args:
        full: the name that timm knows, which `TimmSource.full` returns.
        name: the name that the user knows, for messages.
        pretrained: as `seed`, `arguments` and `foreign` in `Source.make`.
        resampling: which tensors of the weights may be resampled.

    Returns:
        The module, and how its weights were fitted, None for random ones.
    """
    check_known(full, name)
    unreachable = None
    if foreign:
        unreachable = "nothing is fetched for a store (--trust-store allows it)"
    elif full.startswith(HUB) or (pretrained and not full.startswith(FOLDER)):
        unreachable = why_unreachable()
    with local_only() if unreachable else nullcontext():
        try:
            arguments = _accepted_arguments(full, arguments)
            who = name
            if arguments:
                who = f"{name} with {_listed(arguments)}"
            size = _folder_image_size(full, name)
            with by_the_rule(who, resampling or Resampling(), size) as fits:
                module = _build(full, pretrained, seed, arguments)
            return module, fits[0] if fits else None
        except Exception as error:
            raise _explain(error, name, pretrained, arguments, unreachable) from error


def _listed(arguments: Mapping[str, Any]) -> str:
    """Return `key=value, ...` for a message."""
    return ", ".join(f"{key}={value}" for key, value in arguments.items())


def _folder_image_size(full: str, name: str) -> tuple[int, int] | None:
    """Return (rows, cols) of the images that a folder's weights are for, None where its config.json
    does not say."""
    if not full.startswith(FOLDER):
        return None
    config = read_config(Path(full.removeprefix(FOLDER)), name)
    args = config.get("model_args")
    size = args.get("img_size") if isinstance(args, dict) else None
    if isinstance(size, int):
        return size, size
    if not isinstance(size, list) or len(size) != 2:
        return None
    rows, cols = size
    if isinstance(rows, int) and isinstance(cols, int):
        return rows, cols
    return None


def on_meta(full: str, arguments: dict[str, Any]) -> nn.Module:
    """Return the module without weights and without memory for them."""
    with meta_device(), Unfilled():
        return _build(full, pretrained=False, seed=0, arguments=arguments)


def refitted_tensors(
    module: nn.Module, full: str, arguments: dict[str, Any]
) -> dict[str, list[str]]:
    """Return the tensors whose shape differs from the pretrained weights', because of arguments.

    Returns:
        `missing`: classifier tensors, which are left random; `resampled`: "NAME (shape) to
        (shape)", most of them position tables. An empty list has no entry.
    """
    if not arguments:
        return {}
    with local_only():
        pretrained_shapes = {
            key: tuple(p.shape) for key, p in on_meta(full, {}).named_parameters()
        }
    heads = classifier_prefixes(module)
    missing = []
    resampled = []
    for key, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        pretrained_shape = pretrained_shapes.get(key, shape)
        if pretrained_shape == shape:
            continue
        if heads and key.startswith(heads):
            missing.append(key)
        else:
            resampled.append(f"{key} {pretrained_shape} to {shape}")
    tensors = {"missing": missing, "resampled": resampled}
    return {key: entries for key, entries in tensors.items() if entries}


def ambiguous_head_count(
    module: nn.Module, full: str, arguments: dict[str, Any]
) -> int | None:
    """Return the number of heads per block where no shape of a tensor depends on it, so that a
    checkpoint does not show it.

    None where shapes depend on it, heads differ by block, or the user gave their number.
    """
    counts = set()
    for child in module.modules():
        n_heads = getattr(child, "num_heads", None)
        if isinstance(n_heads, int):
            counts.add(n_heads)
    if len(counts) != 1 or "num_heads" in arguments:
        return None
    (n_heads,) = counts
    shapes = {key: x.shape for key, x in module.state_dict().items()}
    for other_n_heads in (2 * n_heads, n_heads // 2):
        try:
            variant = on_meta(full, {**arguments, "num_heads": other_n_heads})
        except Exception:  # it cannot have so many, or takes no such argument
            continue
        if {key: x.shape for key, x in variant.state_dict().items()} == shapes:
            return n_heads
    return None


def check_known(full: str, name: str) -> None:
    """Raise ModelError unless timm knows a name, or wrote the config.json of its folder."""
    import timm

    if not full.startswith((*HUB, FOLDER)) and not timm.is_model(full):
        hint = path_hint(name)
        if hint:
            raise ModelError(f"{name} {hint}")
        near = near_names(full.partition(".")[0], timm.list_models())
        raise ModelError(
            f"no timm model is called {name!r}{near} (run: vitsee models '*PART*')"
        )
    if full.startswith(FOLDER):
        _check_folder(Path(full.removeprefix(FOLDER)), name)


def _check_folder(folder: Path, name: str) -> None:
    """Raise ModelError unless a folder's config.json has entries of timm's types, and no argument
    that chooses what to load."""
    import timm

    if not folder.is_dir():
        raise ModelError(
            f"{name}: no such folder; expected one with config.json and model.safetensors"
        )
    config = read_config(folder, name)
    architecture = config.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ModelError(
            f"{name}: its config.json says architecture {str(architecture)[:40]!r}; "
            "expected a timm name (run: vitsee models '*PART*')"
        )
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(config.get(key, {}), dict):
            raise ModelError(f"{name}: {key} in its config.json is no object")
    # timm's older config.json has the entries of pretrained_cfg at its top.
    pretrained_config = config.get("pretrained_cfg", config)
    if "input_size" in pretrained_config:
        checked_size(pretrained_config["input_size"], name)
    refuse_loading(
        config.get("model_args", {}), f"{name}: model_args of its config.json: "
    )


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return a folder's config.json, {} where it holds no object.

    Raises:
        ModelError: there is none, or it is not JSON.
    """
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


def _accepted_arguments(full: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, without an image size that the architecture does not take.

    Raises:
        ModelError: the weights would not fit the memory, or images are smaller than a patch.
        TypeError: the architecture does not take another argument.
    """
    if not arguments:
        return arguments
    try:
        module = on_meta(full, arguments)
    except TypeError as error:
        if "img_size" in arguments and "img_size" in str(error):
            rest = {key: x for key, x in arguments.items() if key != "img_size"}
            return _accepted_arguments(full, rest)
        raise
    except NotImplementedError:  # an architecture that cannot be made without memory
        return arguments
    tensors = module.state_dict().values()
    size_bytes = sum(x.numel() * x.element_size() for x in tensors)
    if size_bytes > memory_bytes():
        raise ModelError(
            f"the weights of {full} would take {human_bytes(size_bytes)}, more than the "
            f"memory"
        )
    patch: Any = getattr(getattr(module, "patch_embed", None), "patch_size", None)
    size: Any = arguments.get("img_size")
    are_tuples = isinstance(patch, tuple) and isinstance(size, tuple)
    are_pairs = are_tuples and len(patch) == len(size) == 2
    if are_pairs and (size[0] < patch[0] or size[1] < patch[1]):
        raise ModelError(
            f"--img-size {size[0]}x{size[1]} is less than one patch of "
            f"{patch[0]}x{patch[1]} pixels; choose a larger one"
        )
    return arguments


def _build(
    full: str, pretrained: bool, seed: int, arguments: dict[str, Any]
) -> nn.Module:
    """Return timm's module under a seed; the caller's random state stays as it is."""
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = timm.create_model(full, pretrained=pretrained, **arguments)
    return module


def _explain(
    error: Exception,
    name: str,
    pretrained: bool,
    arguments: dict[str, Any],
    unreachable: str | None,
) -> Exception:
    """Return the error that the user is shown; the same one where it is a fault of vitsee.

    Args:
        error: what timm or the hub's client raised.
        name: the model, as the user knows it.
        pretrained: whether weights were loaded.
        arguments: the model's arguments.
        unreachable: why the hub was not asked, None if it was.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError | NotHere):
        why = unreachable or "they cannot be fetched"
        return NotHere(
            f"the weights of {name} are not on this machine, and {why}; give "
            "--checkpoint FILE or --random-init SEED"
        )
    if isinstance(error, ModelError):
        return error
    if "weights_only" in str(error):
        return ModelError(
            f"{name} cannot be loaded: its weights hold objects besides tensors and "
            "plain values, which could run code; save the state dict alone, as "
            ".safetensors"
        )
    listed = _listed(arguments)
    if isinstance(error, TypeError):
        return ModelError(f"{name} does not take these arguments: {one_line(error)}")
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        return ModelError(
            f"the pretrained weights of {name} do not fit {listed or 'it'}: "
            f"{_abbreviate_misfit(error)}; give --random-init SEED, or --checkpoint FILE "
            "with weights of this shape"
        )
    if isinstance(error, OSError) or "No pretrained weights" in str(error):
        hint = "; give --checkpoint FILE or --random-init SEED" if pretrained else ""
        return ModelError(f"{name} cannot be loaded: {one_line(error)}{hint}")
    if isinstance(
        error, RuntimeError | ValueError | AssertionError | KeyError | ArithmeticError
    ):
        hint = f" with {listed}" if listed else ""
        reason = _failed_assertion(error) or one_line(error)
        return ModelError(f"{name} cannot be made{hint}: {reason}")
    return error


def _failed_assertion(error: Exception) -> str:
    """Return the condition of an assertion of timm's without a message, "" for other errors."""
    if not isinstance(error, AssertionError) or str(error):
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if line.startswith("assert "):
        return f"timm asks for {line.removeprefix('assert ')}"
    return ""


def _abbreviate_misfit(error: Exception) -> str:
    """Return torch's list of tensors that do not fit as counts with the first names."""
    text = " ".join(str(error).split())
    clauses = []
    for title, description in (("Missing", "not in them"), ("Unexpected", "left over")):
        listed = re.search(
            rf'{title} key\(s\) in state_dict: ((?:"[^"]*"(?:, )?)+)', text
        )
        if listed is not None:
            names = re.findall(r'"([^"]*)"', listed[1])
            clauses.append(f"{description} {len(names)} ({some(names)})")
    sizes = re.findall(r"size mismatch for ([\w.]+):", text)
    if sizes:
        clauses.append(f"of another size {len(sizes)} ({some(sizes)})")
    return "; ".join(clauses) or one_line(error)


class NotHere(ModelError):
    """Weights that this machine does not have."""


@contextmanager
def local_only() -> Iterator[None]:
    """Return a context in which timm uses its caches and no network.

    timm has no switch for it, so its two ways out, downloads from the hub and from an address,
    are closed where timm calls them.
    """
    import torch.hub

    hub: Any = importlib.import_module("timm.models._hub")

    def refuse(url: str, *_: Any, **__: Any) -> None:
        """Raise NotHere in place of a download."""
        raise NotHere(f"{Path(str(url)).name} is not on this machine")

    cached = functools.partial(hub.hf_hub_download, local_files_only=True)
    with (
        mock.patch.object(hub, "hf_hub_download", cached),
        mock.patch.object(hub, "download_url_to_file", refuse),
        mock.patch.object(torch.hub, "download_url_to_file", refuse),
    ):
        yield


def why_unreachable() -> str | None:
    """Return why the hub does not answer, after seconds at most; None if it does.

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

"""open_clip's own way of loading weights, with the rule that holds for every source
(`weights/fitting.py`) in place of its strict loading: names are cut, a visual tower alone is
enough, what is left over is judged, grids are compared.

open_clip has no argument for it: its function that loads a file is replaced where its builder
calls it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.checkpoints import preferred_state
from vitsee_core.models.weights.fitting import Fit, fit
from vitsee_core.models.weights.positions import Resampling

TOWER = "visual."
# Arguments of open_clip.create_model that choose what is loaded, or how the module is compiled.
LOADING = {
    "pretrained": "its weights are a tag, NAME/TAG, or --checkpoint FILE",
    "load_weights": "random weights are --random-init SEED",
    "pretrained_image": "its weights are a tag, NAME/TAG, or --checkpoint FILE",
    "pretrained_text": "the text's tower is not used",
    "pretrained_hf": "the text's tower is not used",
    "pretrained_image_path": "weights of a file are --checkpoint FILE",
    "pretrained_text_path": "the text's tower is not used",
    "require_pretrained": "weights that are not there are refused anyway",
    "weights_only": "files are read without running code",
    "precision": "weights are float32",
    "device": "the device is --device",
    "jit": "hooks need a module that is not compiled",
}


def refuse_loading(args: Mapping[str, Any]) -> None:
    """Refuse arguments that choose what to load, not how the model is made.

    Raises:
        ModelError: names the first.
    """
    for name in args:
        if name in LOADING:
            raise ModelError(
                f"--model-arg {name}={str(args[name])[:40]} is not passed on to "
                f"open_clip: {LOADING[name]}"
            )


@contextmanager
def by_the_rule(who: str, resampling: Resampling) -> Iterator[list[Fit]]:
    """Return a context in which visual towers of open_clip get their weights by the rule; the list
    gets the fit of each that did.

    Args:
        who: the model, as messages call it.
        resampling: which tensors may be resampled, and what is known of the weights' images.

    Raises:
        ModelError: within: the weights are not the tower's.
    """
    factory: Any = importlib.import_module("open_clip.factory")
    original = factory.load_checkpoint
    fits: list[Fit] = []

    def load(model: nn.Module, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        """Load a file into the visual tower alone by the rule, in place of open_clip's function."""
        path = Path(checkpoint_path)
        if path.suffix in (".npz", ".npy"):
            # Arrays of big_vision, which open_clip copies one by one under names of its own.
            return original(model, checkpoint_path, *args, **kwargs)
        tower = model.get_submodule(TOWER.rstrip("."))
        result = fit(
            tower,
            preferred_state(read_file(path), who),
            who,
            convert=partial(_tower_state, model),
            resampling=resampling,
        )
        tower.load_state_dict(result.tensors, strict=False)
        fits.append(result)
        return None

    with mock.patch.object(factory, "load_checkpoint", load):
        yield fits


def _tower_state(
    model: nn.Module, state: dict[str, Tensor], tower: nn.Module
) -> dict[str, Tensor]:
    """Return a state dict under the tower's names: open_clip's conversion of foreign layouts gives
    the whole model's.

    Args:
        model: the whole model.
        state: the file's tensors, of the whole model or of the tower alone.
        tower: the visual tower, which `fit` passes on.
    """
    convert: Any = importlib.import_module("open_clip.convert").convert_state_dict
    converted: dict[str, Tensor] = convert(model, state)
    below = {
        name.removeprefix(TOWER): x
        for name, x in converted.items()
        if name.startswith(TOWER)
    }
    return below or converted

"""timm's own way of loading weights, with the rule that holds for every source
(`weights/fitting.py`) in place of the conversion alone: names are cut, what is left over is judged,
grids are compared.

timm has no argument for it: the function that loads weights is wrapped where timm's builder calls
it, and the conversion of an architecture is replaced by one that ends in the rule.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.checkpoints import preferred_state
from vitsee_core.models.weights.copies import Convert
from vitsee_core.models.weights.fitting import Fit, fit
from vitsee_core.models.weights.positions import Resampling


@contextmanager
def by_the_rule(
    who: str, resampling: Resampling, stated_size: tuple[int, int] | None = None
) -> Iterator[list[Fit]]:
    """Return a context in which timm's models get their weights by the rule; the list gets the fit
    of each that did.

    Args:
        who: the model, as messages call it.
        resampling: which tensors may be resampled.
        stated_size: (rows, cols) in pixels of the images that the weights are for, from a folder's
            configuration; None for those of timm's.

    Raises:
        ModelError: within: the weights are not the model's. What is missing is timm's own error.
    """
    builder: Any = importlib.import_module("timm.models._builder")
    hub: Any = importlib.import_module("timm.models._hub")
    original = builder.load_pretrained
    fits: list[Fit] = []

    def load(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Call timm's `load_pretrained` with `fit` (weights/fitting.py) in place of its conversion;
        append the fit to `fits`."""
        convert: Convert | None = kwargs.pop("filter_fn", None)
        config: Mapping[str, Any] = kwargs.get("pretrained_cfg") or {}
        # timm's input_size is (channels, rows, cols).
        size = stated_size or tuple(config.get("input_size") or ())[-2:]
        sized_resampling = dataclasses.replace(
            resampling, stated_size=size if len(size) == 2 else None
        )

        def fit_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
            """Return the tensors of a file under the model's names."""
            result = fit(
                module,
                preferred_state(state, who),
                who,
                convert=convert,
                resampling=sized_resampling,
                refuse_incomplete=False,
            )
            fits.append(result)
            return result.tensors

        original(model, *args, filter_fn=fit_state, **kwargs)

    def read(path: Any, *_: Any, **__: Any) -> Any:
        """Read a file of weights without running its code."""
        return read_file(Path(path))

    with (
        mock.patch.object(builder, "load_pretrained", load),
        mock.patch.object(hub, "load_state_dict", read, create=True),
    ):
        yield fits

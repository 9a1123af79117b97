"""A model that is ready to run, and the record of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from vitsee_core.models.intervention_spec import Intervention
from vitsee_core.models.survey.geometry import ModelGeometry
from vitsee_stores.manifest import abbreviate
from vitsee_stores.plan import Canvas


@dataclass
class LoadedModel:
    """A model ready to run: eval mode, no gradients, float32, on the CPU.

    Attributes:
        name: the name that it was loaded by.
        module: the torch module.
        input_size: (channels, rows, cols).
        transform: input_size, interpolation, crop_pct, crop_mode, mean, std.
        weights: the record of its weights. `source` is "pretrained", "random", "checkpoint",
            "local-dir", or "module" for a caller's module, `sha256` the hash of all tensors. For a
            checkpoint also its file, the key used, missing and unexpected tensors, its layout if
            that is a known one, and `assumed`: preprocessing and heads that neither the file nor
            the caller states. Pretrained weights that were fitted to other arguments have missing
            (tensors left random) and resampled ("NAME (shape) to (shape)"), too.
        architecture: a text that is the same for models with the same sites.
        model_args: the architecture's arguments that the user gave.
        class_names: the names of the logits' classes, None where they are not known.
        ablate_skip: residual sublayers that work without their skip connection, sorted.
        trained_without: blocks or sublayers whose skip a folder's config.json leaves out.
        interventions: what extractions change while it runs; none is in effect by itself.
        geometry: its tokens where registers were added, None elsewhere.
        origin: what the source says of itself: library, version, notes.
        native: how images come to lie on a canvas, still without a size, where it was loaded for
            images at native resolution; None elsewhere.
    """

    name: str
    module: nn.Module
    input_size: tuple[int, int, int]
    transform: dict[str, Any]
    weights: dict[str, Any]
    architecture: str
    model_args: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    ablate_skip: tuple[str, ...] = ()
    trained_without: tuple[str, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    geometry: ModelGeometry | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    native: Canvas | None = None

    def notes(self) -> list[str]:
        """Return what a user of the model should know, a line each.

        The lines are, in this order: remarks of the source; the layout of a checkpoint and what is
        assumed of it; advice of timm's configuration; which of a file's weights were taken, and
        which tensors were left random, resampled or without use; skip connections that the
        model's configuration leaves out.
        """
        weights = self.weights
        label = weights.get("file") or weights.get("pretrained") or "weights"
        lines = [f"{self.name} {note}" for note in self.origin.get("notes", ())]
        lines += self._layout_notes()
        lines += [f"{label}: {note}" for note in weights.get("notes", ())]
        facts = self._weight_facts()
        if facts:
            lines.append(f"{label}: {'; '.join(facts)}")
        if self.trained_without:
            blocks = abbreviate(self.trained_without)
            lines.append(
                f"{self.name} has no skip connections in {blocks} (its config.json)"
            )
        return lines

    def _weight_facts(self) -> list[str]:
        """Return which weights of a file were taken, and how they fit, for one line of notes."""
        weights = self.weights
        facts = []
        other_keys = weights.get("other_keys")
        key = weights.get("key", "")
        if other_keys or "ema" in key.lower():  # averaged weights are always said
            facts.append(f"taken: {self._taken_copy() or 'names without a prefix'}")
        if other_keys:
            option = f"--checkpoint-key {other_keys[0]}"
            if "file" not in weights:
                option = f"--checkpoint FILE {option}"
            facts.append(f"other copies: {abbreviate(other_keys)} ({option})")
        descriptions = {
            "missing": "not in these weights, so random",
            "resampled": "resampled",
            "unexpected": "left over",
        }
        for entry, description in descriptions.items():
            names = weights.get(entry)
            if names:
                facts.append(f"{description}: {abbreviate(names)}")
        return facts

    def _taken_copy(self) -> str:
        """Return the key and the prefix of the weights that were taken, "" if they have neither."""
        key: str = self.weights.get("key", "")
        prefix: str = self.weights.get("prefix", "").strip(".")
        if not prefix or not key:
            return key or prefix
        if prefix.endswith(key) or key.endswith(prefix):
            return key  # one repeats the other
        return f"{key}.{prefix}"

    def _layout_notes(self) -> list[str]:
        """Return a line about the layout of a checkpoint and the settings that follow from it or
        are assumed; nothing for other weights."""
        weights = self.weights
        layout = weights.get("layout")
        assumed = weights.get("assumed")
        if weights.get("source") != "checkpoint" or (layout is None and not assumed):
            return []
        if not assumed:
            follows = {
                "mean": self.transform["mean"],
                "std": self.transform["std"],
                "crop_pct": self.transform["crop_pct"],
            }
            settings = _settings_text(follows)
            return [f"{weights['file']} is a checkpoint of {layout}: {settings}"]
        option_by_setting = {
            "mean": "--img-mean",
            "std": "--img-std",
            "crop_pct": "--crop-pct",
            "num_heads": "--model-arg num_heads=N",
        }
        options = [
            option for name, option in option_by_setting.items() if name in assumed
        ]
        verdict = f"has no known layout: as {self.name} has them"
        if layout:
            verdict = f"may be {layout}"
        return [
            f"{weights['file']} {verdict}, assumed are {_settings_text(assumed)} "
            f"(a file of weights does not say them; for others: {', '.join(options)})"
        ]


def _settings_text(values: Mapping[str, Any]) -> str:
    """Return settings as text, `mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5; num_heads 3`."""
    settings = []
    for name, value in values.items():
        numbers = ", ".join(f"{number:g}" for number in np.atleast_1d(value))
        settings.append(f"{name} {numbers}")
    return "; ".join(settings)

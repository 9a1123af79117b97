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

    input_size: (channels, rows, cols). transform: input_size, interpolation, crop_pct, crop_mode,
    mean, std. weights: source ("pretrained", "random", "checkpoint", "local-dir", or "module" for a
    caller's own), sha256 of all tensors, for a checkpoint its file, the key used, and what was
    missing or unexpected, its layout if that is a known one (see weights/checkpoints.py), and
    `assumed`, preprocessing and heads that neither the file nor the caller states; missing (tensors
    left random) and resampled (tensors of another size in the weights, "NAME (shape) to (shape)")
    also of pretrained weights that were fitted to other arguments.
    ablate_skip: residual sublayers that work without their skip, sorted (see lasting_changes.py).
    interventions: what is changed while it runs, see interventions/; none is in effect by itself.
    geometry: its tokens where registers were added (see
    lasting_changes.py), None elsewhere.
    trained_without: blocks or sublayers whose skip a folder's config.json leaves out.
    origin: what the source says of itself, see `Source.origin`.
    native: how images come to lie on a canvas, still without a size, where it was loaded for images
    at native resolution.
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
        """Remarks that a user of the model should know, a line each: what is assumed of a
        checkpoint, or follows from its layout; what timm's configuration advises; skips that its
        own configuration leaves out; of its weights the key taken where a file has several, tensors
        left random, resampled or without use; what its source remarks."""
        weights = self.weights
        parts = []
        others = weights.get("other_keys")
        key = weights.get("key", "")
        prefix = weights.get("prefix", "").strip(".")
        if others or "ema" in key.lower():
            same = not prefix or (key and (prefix.endswith(key) or key.endswith(prefix)))
            taken = key if same else ".".join(word for word in (key, prefix) if word)
            parts.append(f"taken: {taken or 'names without a prefix'}")
        if others:
            file = "" if "file" in weights else "--checkpoint FILE "
            option = f"{file}--checkpoint-key {others[0]}"
            parts.append(f"other copies: {abbreviate(others)} ({option})")
        if missing := weights.get("missing"):
            parts.append(f"not in these weights, so random: {abbreviate(missing)}")
        if resampled := weights.get("resampled"):
            parts.append(f"resampled: {abbreviate(resampled)}")
        if unexpected := weights.get("unexpected"):
            parts.append(f"left over: {abbreviate(unexpected)}")
        where = weights.get("file") or weights.get("pretrained") or "weights"
        lines = [f"{self.name} {note}" for note in self.origin.get("notes", ())]
        lines += [
            *self._assumed(),
            *(f"{where}: {note}" for note in weights.get("notes", ())),
        ]
        lines += [f"{where}: {'; '.join(parts)}"] if parts else []
        if self.trained_without:
            blocks = abbreviate(self.trained_without)
            lines.append(
                f"{self.name} has no skip connections in {blocks} (its config.json)"
            )
        return lines

    def _assumed(self) -> list[str]:
        """A line about the layout of a checkpoint, and what was taken for lack of a better."""
        weights = self.weights
        layout = weights.get("layout")
        assumed = weights.get("assumed")
        if weights.get("source") != "checkpoint" or (layout is None and not assumed):
            return []
        if not assumed:
            taken = {name: self.transform[name] for name in ("mean", "std", "crop_pct")}
            return [f"{weights['file']} is a checkpoint of {layout}: {_settings(taken)}"]
        options = {"mean": "--img-mean", "std": "--img-std", "crop_pct": "--crop-pct"}
        options["num_heads"] = "--model-arg num_heads=N"
        others = ", ".join(option for name, option in options.items() if name in assumed)
        known = (
            f"may be {layout}"
            if layout
            else f"has no known layout: as {self.name} has them"
        )
        return [
            f"{weights['file']} {known}, assumed are {_settings(assumed)} "
            f"(a file of weights does not say them; for others: {others})"
        ]


def _settings(values: Mapping[str, Any]) -> str:
    """`mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5; num_heads 3`."""
    return "; ".join(
        f"{name} {', '.join(f'{x:g}' for x in np.atleast_1d(value))}"
        for name, value in values.items()
    )

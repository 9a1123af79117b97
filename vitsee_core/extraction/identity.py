"""The identity of a store: model, images and choices, as recorded in manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vitsee_core.extraction.options import DataOptions, KeepOptions
from vitsee_core.extraction.plan import Choices
from vitsee_core.images import Selection
from vitsee_core.models.interventions.changes import Changes
from vitsee_core.models.loaded import LoadedModel
from vitsee_stores import StoreWriter
from vitsee_stores.errors import IdentityMismatch
from vitsee_stores.layout import FORMAT_VERSION, StorePlan
from vitsee_stores.manifest import (
    Manifest,
    check_identity,
    jsonable,
    weights_name,
    without_absent,
)
from vitsee_stores.plan import Canvas


def fixed_identity(
    model: LoadedModel, selection: Selection, canvas: Canvas | None = None
) -> dict[str, Any]:
    """Fields that are always compared: model, weights, images."""
    return {
        "format": FORMAT_VERSION,
        "model": _model_identity(model),
        "weights": model.weights["sha256"],
        "ablate_skip": list(model.ablate_skip),
        "transform": model.transform,
        "n_images": len(selection.samples),
        "samples_fingerprint": selection.samples.fingerprint(),
        **({} if canvas is None else {"canvas": without_absent(asdict(canvas))}),
    }


def _model_identity(model: LoadedModel) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "args": model.model_args,
        "input_size": list(model.input_size),
    }


def changed_identity(changes: Changes) -> dict[str, Any]:
    """The fields that interventions add to an identity; an empty dict without any."""
    return {
        **changes.record(),
        **({"reference_stores": list(changes.stores)} if changes.lines else {}),
    }


def given_identity(
    keep: KeepOptions, data: DataOptions, choices: Choices, plan: StorePlan
) -> dict[str, Any]:
    """Fields that were chosen explicitly."""
    of_sites = {key: choices.requested[key] for key in ("sites", "tokens", "dtype")}
    values: dict[str, Any] = {
        **{
            key: value
            for key, value in of_sites.items()
            if getattr(keep, key) is not None
        },
        "seed": data.seed,
        "order": data.order,
        "slab": None if keep.slab is None else min(keep.slab, plan.n_images),
        **{
            key: getattr(keep, key)
            for key in ("codec", "attention", "residual", "inputs", "grams")
        },
        "erf": None if keep.erf is None else min(keep.erf, plan.n_images),
        "precision": keep.precision,
        "head_weights": keep.head_weights,
    }
    return {key: value for key, value in values.items() if value is not None}


def chosen_identity(
    keep: KeepOptions, data: DataOptions, choices: Choices, plan: StorePlan
) -> dict[str, Any]:
    """The choices of a new store, including defaults."""
    return {
        **choices.requested,
        "seed": data.seed if data.seed is not None else 0,
        "order": data.order or "shuffled",
        "slab": plan.slab,
        "codec": choices.codec,
        "attention": choices.attention,
        "residual": choices.residual,
        "inputs": choices.inputs is not None,
        "grams": choices.grams,
        "erf": 0 if plan.erf is None else plan.erf.n_images,
        "precision": choices.precision,
        "head_weights": keep.head_weights,
    }


def check_choices(
    made: Manifest, model: LoadedModel, given: Mapping[str, Any], instead: str = ""
) -> None:
    """`check_identity` of a store, its weights named by the options that chose them. given: fields
    of identity, the weights among them. instead: what else could be done. Raises IdentityMismatch:
    names every field that differs."""
    stored = dict(made.identity)
    given = dict(given)
    if stored.get("weights") != given["weights"]:
        told = [
            _options_of(weights) for weights in (made.model.get("weights"), model.weights)
        ]
        if told[0] != told[1]:
            stored["weights"], given["weights"] = told
        elif jsonable(stored.get("model")) != jsonable(given.get("model")):
            del given["weights"]  # they follow from arguments, which are named
    check_identity(stored, given, instead)


def _options_of(record: object) -> str:
    """The options of extract that chose weights, by their record; `pretrained` without any."""
    weights = record if isinstance(record, Mapping) else {}
    if weights.get("source") == "random":
        return f"--random-init {weights.get('seed')}"
    if weights.get("source") == "checkpoint":
        key = (
            f" --checkpoint-key {weights.get('key')}" if weights.get("other_keys") else ""
        )
        return f"--checkpoint {weights.get('file')}{key}"
    return weights_name({"weights": weights})


def check_same_model(writer: StoreWriter, model: LoadedModel) -> None:
    """Refuse a model that may have other sites. Raises IdentityMismatch: another architecture, or
    other arguments."""
    stored = writer.manifest.model
    if stored.get("architecture") not in (None, model.architecture):
        raise IdentityMismatch(
            f"{writer.place} is a store of {stored.get('name')} ({stored['architecture']}), not of "
            f"{model.name} ({model.architecture}); choose another -o, or start anew with --force"
        )
    if made := writer.manifest.identity.get("model"):
        own = _model_identity(model)
        if jsonable(own["args"]) != made.get("args"):
            check_identity({"model": made}, {"model": own})

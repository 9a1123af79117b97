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
from vitsee_stores.manifest import Manifest, check_identity, jsonable, without_absent
from vitsee_stores.plan import Canvas
from vitsee_stores.weights_names import weights_name


def fixed_identity(
    model: LoadedModel, selection: Selection, canvas: Canvas | None = None
) -> dict[str, Any]:
    """Return the identity fields that are always compared: model, weights, images."""
    fields = {
        "format": FORMAT_VERSION,
        "model": _model_identity(model),
        "weights": model.weights["sha256"],
        "ablate_skip": list(model.ablate_skip),
        "transform": model.transform,
        "n_images": len(selection.samples),
        "samples_fingerprint": selection.samples.fingerprint(),
    }
    if canvas is not None:
        fields["canvas"] = without_absent(asdict(canvas))
    return fields


def _model_identity(model: LoadedModel) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "args": model.model_args,
        "input_size": list(model.input_size),
    }


def changed_identity(changes: Changes) -> dict[str, Any]:
    """Return the fields that interventions add to an identity; {} without any."""
    fields = dict(changes.record())
    if changes.lines:
        fields["reference_stores"] = list(changes.stores)
    return fields


def given_identity(
    keep: KeepOptions, data: DataOptions, choices: Choices, plan: StorePlan
) -> dict[str, Any]:
    """Return the identity fields that were chosen explicitly, resolved.

    Args:
        keep: options that say what a store keeps.
        data: options that choose the images.
        choices: the resolved choices.
        plan: plan of the store that is joined.
    """
    fields: dict[str, Any] = {}
    for key in ("sites", "tokens", "dtype"):
        if getattr(keep, key) is not None:
            fields[key] = choices.requested[key]
    fields["seed"] = data.seed
    fields["order"] = data.order
    if keep.slab is not None:
        fields["slab"] = min(keep.slab, plan.n_images)
    for key in ("codec", "attention", "residual", "inputs", "grams"):
        fields[key] = getattr(keep, key)
    if keep.erf is not None:
        fields["erf"] = min(keep.erf, plan.n_images)
    fields["precision"] = keep.precision
    fields["head_weights"] = keep.head_weights
    return {key: value for key, value in fields.items() if value is not None}


def chosen_identity(
    keep: KeepOptions, data: DataOptions, choices: Choices, plan: StorePlan
) -> dict[str, Any]:
    """Return the identity fields of a new store's choices, including defaults."""
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
    manifest: Manifest, model: LoadedModel, given: Mapping[str, Any], instead: str = ""
) -> None:
    """Compare identity fields with a store's, weights by the options that chose them.

    Args:
        manifest: manifest of the store.
        model: the model that would continue it.
        given: identity fields of that model and the choices, `weights` among them.
        instead: further advice, added to the end of the error's message.

    Raises:
        IdentityMismatch: names every field that differs.
    """
    stored = dict(manifest.identity)
    given = dict(given)
    if stored.get("weights") != given["weights"]:
        # Options say more to a user than two hashes.
        stored_options = _options_of(manifest.model.get("weights"))
        given_options = _options_of(model.weights)
        if stored_options != given_options:
            stored["weights"] = stored_options
            given["weights"] = given_options
        elif jsonable(stored.get("model")) != jsonable(given.get("model")):
            del given["weights"]  # they follow from arguments, which are named
    check_identity(stored, given, instead)


def _options_of(record: object) -> str:
    """Return the options of extract that chose weights, or else the weights' name."""
    weights = record if isinstance(record, Mapping) else {}
    if weights.get("source") == "random":
        return f"--random-init {weights.get('seed')}"
    if weights.get("source") == "checkpoint":
        option = f"--checkpoint {weights.get('file')}"
        if weights.get("other_keys"):
            option += f" --checkpoint-key {weights.get('key')}"
        return option
    return weights_name({"weights": weights})


def check_same_model(writer: StoreWriter, model: LoadedModel) -> None:
    """Refuse a model that may have other sites than a store's.

    Raises:
        IdentityMismatch: another architecture, or other arguments.
    """
    stored = writer.manifest.model
    if stored.get("architecture") not in (None, model.architecture):
        raise IdentityMismatch(
            f"{writer.place} is a store of {stored.get('name')} ({stored['architecture']}), not of "
            f"{model.name} ({model.architecture}); choose another -o, or start anew with --force"
        )
    stored_identity = writer.manifest.identity.get("model")
    if stored_identity:
        identity = _model_identity(model)
        if jsonable(identity["args"]) != stored_identity.get("args"):
            check_identity({"model": stored_identity}, {"model": identity})

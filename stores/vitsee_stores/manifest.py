"""The manifest: how a store was made, its contents, its identity, what it adds to another store.

It is JSON in the root group's attributes, under "vitsee": opening an untrusted store runs no
code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from vitsee_stores.errors import IdentityMismatch, StoreError
from vitsee_stores.layout import FEATURES, FORMAT_VERSION, StorePlan
from vitsee_stores.samples import Samples, encode_id
from vitsee_stores.schema import (
    Count,
    Digest,
    Integer,
    Real,
    check_name,
    check_plan,
    checked,
    require_fields,
)

ATTRIBUTE = "vitsee"
ABSENT = "nothing"  # stands for a field without a value in messages
MAX_SHOWN_CHARS = 80

Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Object = dict[str, Any]


@dataclass(frozen=True)
class Growth:
    """The record of a later generation: its predecessors, and where its slabs and sites belong.

    Attributes:
        after: store_id of each generation before, in order; the first is that of the store as
            it was made.
        first_slab: index within the combined store of this generation's slab 0. It is 0 where
            sites are added for all images, else the first slab that the earlier images did
            not fill.
        sites: names of all sites of the combined store in the model's order, aliases
            included.
        samples_fingerprint: fingerprint of all images of the combined store.
    """

    after: Annotated[tuple[str, ...], Meta(min_length=1)]
    first_slab: Annotated[int, Meta(ge=0, le=1 << 27)]
    sites: tuple[str, ...]
    samples_fingerprint: str

    @property
    def number(self) -> int:
        """The generation's number; the store as it was made is 1."""
        return len(self.after) + 1


@dataclass(frozen=True)
class Manifest:
    """Provenance and contents of a store.

    Attributes:
        format: number of the format version.
        store_id: sha256 of the identity and a random nonce.
        identity: every choice that a process compares before it joins or resumes the store.
        plan: the store's contents, from which its arrays follow.
        samples_fingerprint: sha256 of the images' ids and labels; equal in stores that pair.
        model: name, weights and input size of the model.
        transform: how images were resized, cropped and normalised.
        class_names: names of the labels; None without any.
        selfcheck: differences that were measured between the captured and the model's values.
        left_out: default of extract that the model could not serve -> reason.
        info: further descriptions of how the store was made.
        splits: split names; `samples/split` holds indices into them.
        features: format extensions in use; readers refuse a store with an unknown one.
        checksums: path of each write-once array -> its crc32c, set on creation.
        growth: what a later generation adds to a store; None for the first generation.
    """

    format: int
    store_id: Digest
    identity: dict[str, Any]
    plan: StorePlan
    samples_fingerprint: Digest
    model: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    selfcheck: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    checksums: dict[str, Checksum] = field(default_factory=dict)
    growth: Growth | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest in JSON types, as it is written to disk."""
        fields: dict[str, Any] = jsonable(dataclasses.asdict(self))
        if self.growth is None:
            del fields["growth"]
        fields["plan"] = without_absent(fields["plan"])
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` described.

        Args:
            data: JSON from anybody: every type and range in it is checked.

        Raises:
            StoreError: another format version, an unknown feature, missing or invalid fields.
        """
        # FORMAT.md fixes the order: the format first, as nothing else of another version can
        # be interpreted; then the features; then all else.
        _require_format_version(data.get("format"))
        try:
            features = checked(data.get("features"), tuple[str, ...], "features")
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None
        if unknown := [name for name in features if name not in FEATURES]:
            names = abbreviate([repr(name[:MAX_SHOWN_CHARS]) for name in unknown])
            raise StoreError(
                f"the store uses {names}, which this vitsee does not read; update vitsee"
            )
        try:
            return _checked_manifest(data, features)
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None


def _require_format_version(version: Any) -> None:
    """Raise StoreError unless `version` is the format version that this package reads."""
    # `type`, not `isinstance`: true, which JSON has too, is an instance of int.
    if type(version) is int and version == FORMAT_VERSION:
        return
    if isinstance(version, int) and version > FORMAT_VERSION:
        advice = "update vitsee"
    else:
        advice = "extract it anew"
    version_text = json.dumps(version)[:MAX_SHOWN_CHARS]
    raise StoreError(
        f"store format {version_text}, but this vitsee reads format {FORMAT_VERSION}; "
        f"{advice}"
    )


def _checked_manifest(data: Mapping[str, Any], features: tuple[str, ...]) -> Manifest:
    """Convert a manifest's JSON, and check that its fields agree.

    Raises:
        ValueError: names the first field that is missing or invalid.
    """
    checked(data, _Descriptions)
    checked(data.get("left_out"), dict[str, str], "left_out")
    checked(data.get("checksums"), dict[str, Checksum], "checksums")
    checked(data["info"].get("versions") or {}, dict[str, str], "info.versions")
    manifest = checked(data, Manifest)
    require_fields(data, manifest)
    specs = check_plan(manifest.plan)
    if sorted(features) != sorted(manifest.plan.features):
        raise ValueError(
            f"features are {list(features)}, its plan has {list(manifest.plan.features)}"
        )
    write_once = {path for path, spec in specs.items() if spec.per == "once"}
    if set(manifest.checksums) != write_once:
        raise ValueError("checksums does not name the arrays that are written once")
    if manifest.growth is not None:
        for i, name in enumerate(manifest.growth.sites):
            check_name(name, f"growth.sites[{i}]")
    return manifest


# Fields of a plan, at whatever depth, that are written only where they are not None. They came
# after the format, so that a store without them has the bytes that it always had.
LATER_FIELDS = (
    "window",
    "frames",
    "stride_frames",
    "clip",
    "short_side",
    "min_pixels",
    "max_pixels",
    "own_grids",
    "pixel_hashes",
)


def without_absent(value: Any) -> Any:
    """Return a plan's JSON, or a part of it, without `LATER_FIELDS` that are None."""
    if isinstance(value, dict):
        return {
            key: without_absent(item)
            for key, item in value.items()
            if item is not None or key not in LATER_FIELDS
        }
    if isinstance(value, list):
        return [without_absent(item) for item in value]
    return value


class _Identity(Struct):
    """The choices that processes compare before they join a store."""

    model: Object | None = None
    weights: str | None = None
    ablate_skip: list[str] | None = None
    interventions: list[str] | None = None
    transform: Object | None = None
    n_images: Count | None = None
    seed: Integer | None = None
    order: str | None = None
    slab: Count | None = None
    codec: str | None = None
    attention: str | None = None
    residual: bool | None = None
    inputs: bool | None = None
    grams: bool | None = None
    erf: Count | None = None
    precision: str | None = None
    tokens: Object | None = None
    dtype: Object | None = None


class _Weights(Struct):
    """Names of entries of a checkpoint that did not match the model, and of its other weights."""

    missing: list[str] | None = None
    unexpected: list[str] | None = None
    other_keys: list[str] | None = None


class _Model(Struct):
    """The model and what was changed in it."""

    name: str | None = None
    architecture: str | None = None
    args: Object | None = None
    input_size: list[Count] | None = None
    n_params: Count | None = None
    weights: _Weights | None = None
    ablate_skip: list[str] | None = None
    interventions: list[str] | None = None


class _Transform(Struct):
    """How images were brought to the model's input."""

    input_size: list[Count] | None = None
    interpolation: str | None = None
    crop_mode: str | None = None
    crop_pct: Real | None = None
    crop_border_pixels: Count | None = None
    fill: str | None = None
    short_side: Count | None = None
    multiple: Count | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    processor: str | None = None
    mean: list[Real] | None = None
    std: list[Real] | None = None


class _Info(Struct):
    """How the store was made: data, versions, first images."""

    data: Object | None = None
    data_folder: str | None = None
    checkpoint: str | None = None
    versions: Object | None = None
    selection: Object | None = None
    first_images_sha256: str | None = None
    input_weights: Object | None = None


class _Descriptions(Struct):
    """The fields of a manifest's descriptions that readers rely on, as a schema.

    Each may be absent or null. Other fields may be anything, and all are kept as they are.
    """

    identity: _Identity
    model: _Model
    transform: _Transform
    info: _Info


def new_manifest(
    identity: Mapping[str, Any],
    plan: StorePlan,
    samples: Samples,
    *,
    model: Mapping[str, Any] | None = None,
    transform: Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
    selfcheck: Mapping[str, Any] | None = None,
    left_out: Mapping[str, str] | None = None,
    info: Mapping[str, Any] | None = None,
    splits: Sequence[str] = (),
    growth: Growth | None = None,
) -> Manifest:
    """Return the manifest of a new store, with a store_id of its own.

    Args:
        identity: every choice that a process compares before it joins the store.
        plan: the planned arrays; widths that depend on the samples are filled in.
        samples: the images in the store's order.
        splits: split names whose codes come before those of the samples' splits, as a later
            generation keeps the codes of the earlier ones.
        growth: what a later generation adds; None for a store of its own. The other arguments
            are attributes of `Manifest`.

    Raises:
        StoreError: a sample's id cannot be stored.
    """
    plan = with_samples(plan, samples)
    identity_fields = jsonable(dict(identity))
    # The nonce tells two stores of one identity apart.
    text = json.dumps([identity_fields, secrets.token_hex(16)], sort_keys=True)
    return Manifest(
        format=FORMAT_VERSION,
        store_id=hashlib.sha256(text.encode()).hexdigest(),
        identity=identity_fields,
        plan=plan,
        samples_fingerprint=samples.fingerprint(),
        model=jsonable(dict(model or {})),
        transform=jsonable(dict(transform or {})),
        class_names=None if class_names is None else list(class_names),
        selfcheck=jsonable(dict(selfcheck or {})),
        left_out=dict(left_out or {}),
        info=jsonable(dict(info or {})),
        splits=tuple(dict.fromkeys([*splits, *samples.splits])),
        features=plan.features,
        growth=growth,
    )


def with_samples(plan: StorePlan, samples: Samples) -> StorePlan:
    """Return the plan with the array widths that these samples require.

    Raises:
        StoreError: a sample's id cannot be stored.
    """
    if len(samples) != plan.n_images:
        raise ValueError(f"{len(samples)} samples for a plan of {plan.n_images} images")
    for name in samples.ids:
        # Ids are stored padded with zeros.
        if "\0" in name:
            raise StoreError(
                f"the sample id {name!r} holds a NUL character; rename that image"
            )
    width = max(len(encode_id(name)) for name in samples.ids)
    return dataclasses.replace(
        plan, id_bytes=max(1, width), boxes=samples.boxes is not None
    )


def by_reason(left_out: Mapping[str, str], max_names: int = 3) -> list[str]:
    """Return lines `NAMES: REASON`, one for each reason, with at most `max_names` names each."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names_by_reason.setdefault(reason, []).append(name)
    return [
        f"{abbreviate(names, max_names)}: {reason}"
        for reason, names in names_by_reason.items()
    ]


def abbreviate(names: Sequence[str], max_names: int = 3) -> str:
    """Return the first `max_names` names and the number of others: `a, b, c and 9 more`."""
    text = ", ".join(names[:max_names])
    if len(names) > max_names:
        text += f" and {len(names) - max_names} more"
    return text


def check_identity(
    stored: Mapping[str, Any], requested: Mapping[str, Any], advice: str = ""
) -> None:
    """Compare identity fields with those of an existing store.

    Args:
        stored: identity fields of the store; others than those in `requested` are ignored.
        requested: identity fields of the process that would join it.
        advice: further advice, added to the end of the error's message.

    Raises:
        IdentityMismatch: names every differing field, the stored value and the requested one.
    """
    lines: list[str] = []
    for key, value in jsonable(dict(requested)).items():
        lines += _identity_differences(key, jsonable(stored.get(key, ABSENT)), value)
    if lines:
        raise IdentityMismatch(
            f"the store was made with other choices: {'; '.join(lines)} "
            f"(choose another -o, drop the option, or start anew with --force{advice})"
        )


def _identity_differences(name: str, stored: Any, requested: Any) -> list[str]:
    """Return a line for each value in which two JSON values differ, at any depth."""
    if isinstance(stored, dict) and isinstance(requested, dict):
        lines = []
        for key in dict.fromkeys([*stored, *requested]):
            lines += _identity_differences(
                f"{name}.{key}", stored.get(key, ABSENT), requested.get(key, ABSENT)
            )
        return lines
    if stored == requested:
        return []
    return [
        f"{name} is {_abbreviate_value(stored)}, given {_abbreviate_value(requested)}"
    ]


def _abbreviate_value(value: Any) -> str:
    """Return a JSON value for use within a line: digests and long texts cut."""
    text = value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return text[:12]
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[: MAX_SHOWN_CHARS - 4]} ..."


def jsonable(value: Any) -> Any:
    """Return `value` in JSON types.

    Tuples and sets become lists, numpy scalars numbers, paths and other objects text. Numbers
    that are not finite become "NaN", "Infinity" and "-Infinity", as strict JSON readers
    refuse them as numbers.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        # Sets have no order of their own, and digests are taken of the text.
        return [jsonable(item) for item in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        if value > 0:
            return "Infinity"
        return "-Infinity"
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return str(value)

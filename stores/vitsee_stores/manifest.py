"""The manifest: how a store was made, what it holds, its identity, what it adds to another store.

JSON only, in the root group's attributes under "vitsee": opening an untrusted store runs no code.
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
    Real,
    Whole,
    check_name,
    check_plan,
    checked,
    require_fields,
)

ATTRIBUTE = "vitsee"
ABSENT = "nothing"
SHOWN_VALUE = 80

Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Object = dict[str, Any]


@dataclass(frozen=True)
class Growth:
    """The record of a later generation: its predecessors, and where its slabs and sites belong.

    Attributes:
        after: store_id of each generation before, in order; the first one is the store itself.
        first_slab: the slab of the whole store that is this generation's slab 0: 0 where sites are
            added for all images, else the first slab that the images before did not fill.
        sites: all sites of the whole store in the model's order, aliases included.
        samples_fingerprint: of all images of the whole store.
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
        identity: every choice that joining and resuming compare.
        left_out: default of extract that the model could not serve -> reason.
        info: other descriptions of how the store was made.
        splits: names of the codes in `samples/split`.
        features: format extensions in use; readers refuse a store with an unknown one.
        checksums: crc32c of each write-once array, set on creation.
        growth: what a generation adds to another store; None for a store of its own.
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
        fields: dict[str, Any] = jsonable(dataclasses.asdict(self))
        if self.growth is None:
            del fields["growth"]
        fields["plan"] = without_absent(fields["plan"])
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest that `to_json` described. Raises StoreError: another format version, an
        unknown feature, or missing fields."""
        version = data.get("format")
        if type(version) is not int or version != FORMAT_VERSION:
            advice = (
                "update vitsee"
                if isinstance(version, int) and version > FORMAT_VERSION
                else "extract it anew"
            )
            shown = json.dumps(version)[:SHOWN_VALUE]
            raise StoreError(
                f"store format {shown}, but this vitsee reads format {FORMAT_VERSION}; {advice}"
            )
        try:
            features = checked(data.get("features"), tuple[str, ...], "features")
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None
        if unknown := [name for name in features if name not in FEATURES]:
            names = abbreviate([repr(name[:SHOWN_VALUE]) for name in unknown])
            raise StoreError(
                f"the store uses {names}, which this vitsee does not read; update vitsee"
            )
        try:
            checked(data, _Descriptions)
            checked(data.get("left_out"), dict[str, str], "left_out")
            checked(data.get("checksums"), dict[str, Checksum], "checksums")
            checked(data["info"].get("versions") or {}, dict[str, str], "info.versions")
            manifest = checked(data, cls)
            require_fields(data, manifest)
            specs = check_plan(manifest.plan)
            if sorted(features) != sorted(manifest.plan.features):
                raise ValueError(
                    f"features are {list(features)}, its plan has {list(manifest.plan.features)}"
                )
            once = {path for path, spec in specs.items() if spec.per == "once"}
            if set(manifest.checksums) != once:
                raise ValueError(
                    "checksums does not name the arrays that are written once"
                )
            if manifest.growth is not None:
                for i, name in enumerate(manifest.growth.sites):
                    check_name(name, f"growth.sites[{i}]")
            return manifest
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None


# Fields of a plan, at whatever depth, that are written only where they are not None.
LATER_FIELDS = (
    *("window", "frames", "stride_frames", "clip"),
    *("short_side", "min_pixels", "max_pixels", "own_grids"),
    "pixel_hashes",
)


def without_absent(value: Any) -> Any:
    """A plan, or a part of it, in JSON without those of `LATER_FIELDS` that are None."""
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
    model: Object | None = None
    weights: str | None = None
    ablate_skip: list[str] | None = None
    interventions: list[str] | None = None
    transform: Object | None = None
    n_images: Count | None = None
    seed: Whole | None = None
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
    missing: list[str] | None = None
    unexpected: list[str] | None = None
    other_keys: list[str] | None = None


class _Model(Struct):
    name: str | None = None
    architecture: str | None = None
    args: Object | None = None
    input_size: list[Count] | None = None
    n_params: Count | None = None
    weights: _Weights | None = None
    ablate_skip: list[str] | None = None
    interventions: list[str] | None = None


class _Transform(Struct):
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
    data: Object | None = None
    data_folder: str | None = None
    checkpoint: str | None = None
    versions: Object | None = None
    selection: Object | None = None
    first_images_sha256: str | None = None
    input_weights: Object | None = None


class _Descriptions(Struct):
    """The fields of a manifest's objects that readers rely on. Each may be absent or null; others
    may be anything, and all are kept as they are."""

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
    """A manifest for a new store, with its own store_id: sha256 of the identity and a random nonce.
    splits: whose codes come before those of the samples' own. Raises StoreError: a sample's id
    cannot be stored."""
    plan = with_samples(plan, samples)
    same = jsonable(dict(identity))
    text = json.dumps([same, secrets.token_hex(16)], sort_keys=True)
    return Manifest(
        format=FORMAT_VERSION,
        store_id=hashlib.sha256(text.encode()).hexdigest(),
        identity=same,
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
    """The plan with the array widths that these samples require. Raises StoreError: a sample's id
    cannot be stored."""
    if len(samples) != plan.n_images:
        raise ValueError(f"{len(samples)} samples for a plan of {plan.n_images} images")
    for name in samples.ids:
        if "\0" in name:
            raise StoreError(
                f"the sample id {name!r} holds a NUL character; rename that image"
            )
    width = max(len(encode_id(name)) for name in samples.ids)
    return dataclasses.replace(
        plan, id_bytes=max(1, width), boxes=samples.boxes is not None
    )


def by_reason(left_out: Mapping[str, str], shown: int = 3) -> list[str]:
    """`names: reason` lines, one per reason, with at most `shown` names each."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"{abbreviate(some, shown)}: {reason}" for reason, some in names.items()]


def abbreviate(names: Sequence[str], shown: int = 3) -> str:
    """`a, b, c and 9 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def check_identity(
    stored: Mapping[str, Any], given: Mapping[str, Any], instead: str = ""
) -> None:
    """Compare the identity fields in `given` with the store's. instead: what else could be done.
    Raises IdentityMismatch: names every differing field, what is stored and what was given."""
    lines: list[str] = []
    for key, value in jsonable(dict(given)).items():
        lines += _differences(key, jsonable(stored.get(key, ABSENT)), value)
    if lines:
        raise IdentityMismatch(
            f"the store was made with other choices: {'; '.join(lines)} "
            f"(choose another -o, drop the option, or start anew with --force{instead})"
        )


def _differences(name: str, stored: Any, given: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(given, dict):
        lines = []
        for key in dict.fromkeys([*stored, *given]):
            lines += _differences(
                f"{name}.{key}", stored.get(key, ABSENT), given.get(key, ABSENT)
            )
        return lines
    if stored == given:
        return []
    return [f"{name} is {_short(stored)}, given {_short(given)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return text[:12]
    if len(text) <= SHOWN_VALUE:
        return text
    return f"{text[: SHOWN_VALUE - 4]} ..."


def jsonable(value: Any) -> Any:
    """`value` in JSON types: tuples as lists, numpy scalars as numbers, paths as text, and
    non-finite numbers as "NaN", "Infinity", "-Infinity", for strict readers."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [jsonable(item) for item in items]
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


# ---------------- the name of a model's weights: column `weights` of tables

SHORT = 8  # digits of a hash


def _tag(name: object) -> str:
    """The tag of pretrained weights `NAME.TAG`, else "pretrained". The dot of a repository or path,
    `OWNER/NAME`, begins no tag, that of timm's at a hub, `hf-hub:OWNER/NAME.TAG`, does."""
    text = str(name or "")
    is_path = "/" in text and ":" not in text
    if is_path:
        return "pretrained"
    return text.partition(".")[2] or "pretrained"


def weights_name(model: Mapping[str, Any]) -> str:
    """The pretrained tag (`augreg_in21k_ft_in1k`), `random SEED`, or the checkpoint file's name
    (`dino.pth`, `dino.pth#student` if it has several state dicts), then `, without
    blocks.3.attn` for ablated skips, `, cls=mean at blocks.6.out` for interventions and `, codes of
    sae.pt` for stores of codes. Weights of a folder have its name. "pretrained" for weights without
    a tag, the first digits of their hash if the source is unknown, "" without any information.

    Args:
        model: the `model` of a manifest; `weights`, `ablate_skip`, `interventions` and `codes` may
            be missing.
    """
    record = model.get("weights")
    weights = record if isinstance(record, Mapping) else {}
    source = weights.get("source")
    digest = str(weights.get("sha256") or "")[:SHORT]
    if source == "random":
        name = f"random {weights.get('seed', '')}".rstrip()
    elif source == "checkpoint":
        key = (
            f"#{weights['key']}"
            if weights.get("other_keys") and weights.get("key")
            else ""
        )
        name = f"{weights.get('file') or 'checkpoint'}{key}"
    elif source in ("pretrained", "local-dir"):
        name = str(weights.get("folder") or "") or _tag(weights.get("pretrained"))
    else:
        name = " ".join(filter(None, [source if isinstance(source, str) else "", digest]))
    ablated = [str(skip) for skip in model.get("ablate_skip") or ()]
    without = [f"without {', '.join(ranges(ablated))}"] if ablated else []
    codes = [f"codes of {model['codes']}"] if model.get("codes") else []
    return ", ".join(
        [name, *without, *map(str, model.get("interventions") or ()), *codes]
    )


def described_weights(manifest: Manifest) -> str:
    """`weights_name`, and of clips how their frames were taken: `, 8 frames`, then `, every 2` if
    they are so far apart, and `, shuffled in time` or `, still in time` for controls."""
    clip = manifest.plan.clip
    name = weights_name(manifest.model)
    if clip is None:
        return name
    words = [f"{clip.frames} frames"]
    if clip.every is not None:
        words.append(f"every {clip.every}")
    if clip.time != "ordered":
        words.append(f"{clip.time} in time")
    return ", ".join([name, *words])


def ranges(names: Sequence[str]) -> list[str]:
    """Paths in short: `blocks.0-11.attn` for those that differ in consecutive last numbers."""
    numbers: dict[tuple[str, str], list[int]] = {}
    texts: list[str] = []
    for name in names:
        if match := re.fullmatch(r"(.*\.)(\d{1,9})((?:\.\D+)?)", name):
            numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            texts.append(name)
    for (before, after), known in numbers.items():
        runs: list[list[int]] = []
        for n in sorted({*known}):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        texts += [f"{before}{a}{f'-{b}' if b > a else ''}{after}" for a, b in runs]
    return texts

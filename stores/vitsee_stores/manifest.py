"""The manifest: how a store was made and what it holds, its identity, and the order of the images.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import IdentityMismatch, StoreError
from vitsee_stores.growth import Growth, read_growth
from vitsee_stores.json_schema import Fields, text
from vitsee_stores.layout import FEATURES, FORMAT_VERSION, StorePlan, arrays
from vitsee_stores.plan_schema import read_plan
from vitsee_stores.records import check_records

ATTRIBUTE = "vitsee"
ABSENT = "nothing"
SHOWN_VALUE = 80


@dataclass(frozen=True)
class Samples:
    """The images in the store's order.

    Attributes:
        index: (images,) position in the data set's own order.
        ids: path below the data folder, or row key.
        labels: (images,) class, -1 for none.
        splits: name of each image's split, "" for none.
        boxes: (images, 4) x0, y0, x1, y1 of each image in its file, NaN for a whole file; None if
            all images are whole files.
    """

    index: NDArray[np.int64]
    ids: list[str]
    labels: NDArray[np.int64]
    splits: list[str]
    boxes: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.index), len(self.ids), len(self.labels), len(self.splits)}
        if self.boxes is not None:
            lengths.add(len(self.boxes))
        if len(lengths) != 1:
            raise ValueError(f"samples of one length were expected, not {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: slice) -> Samples:
        """Consecutive ones of these images."""
        return Samples(
            index=self.index[rows],
            ids=self.ids[rows],
            labels=self.labels[rows],
            splits=self.splits[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
        )

    @property
    def id(self) -> NDArray[np.str_]:
        """(images,) ids as an array."""
        return np.array(self.ids, np.str_)

    @property
    def label(self) -> NDArray[np.int64]:
        """(images,) class of each image, -1 for none."""
        return self.labels

    @property
    def split(self) -> NDArray[np.str_]:
        """(images,) name of each image's split, "" for none."""
        return np.array(self.splits, np.str_)

    def fingerprint(self) -> str:
        """sha256 over id, NUL, label, newline of each image in order; stores pair by it."""
        digest = hashlib.sha256()
        for name, label in zip(self.ids, self.labels.tolist(), strict=True):
            digest.update(f"{name}\0{label}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


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
    store_id: str
    identity: dict[str, Any]
    plan: StorePlan
    samples_fingerprint: str
    model: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    selfcheck: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    checksums: dict[str, int] = field(default_factory=dict)
    growth: Growth | None = None

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = jsonable(dataclasses.asdict(self))
        if self.growth is None:
            del fields["growth"]
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest that `to_json` described.

        Raises:
            StoreError: another format version, an unknown feature, or missing fields.
        """
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
            fields = Fields(data)
            features = fields.list("features", text)
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None
        if unknown := [name for name in features if name not in FEATURES]:
            raise StoreError(
                f"the store uses {few(list(map(repr, unknown)))}, which this vitsee does not read; "
                "update vitsee"
            )
        try:
            check_records(fields)
            plan = read_plan(fields.get("plan"))
            if sorted(features) != sorted(plan.features):
                raise ValueError(
                    f"features are {list(features)}, its plan has {list(plan.features)}"
                )
            sums = {path: spec for path, spec in arrays(plan).items() if spec.per == "once"}
            checksums = fields.object("checksums")
            if set(checksums.value) != set(sums):
                raise ValueError("checksums does not name the arrays that are written once")
            return cls(
                format=version,
                store_id=fields.text("store_id"),
                identity=fields.object("identity").value,
                plan=plan,
                samples_fingerprint=fields.text("samples_fingerprint"),
                model=fields.object("model").value,
                transform=fields.object("transform").value,
                class_names=list(fields.list("class_names", text))
                if "class_names" in fields
                else None,
                selfcheck=fields.object("selfcheck").value,
                left_out=fields.object("left_out").value,
                info=fields.object("info").value,
                splits=fields.list("splits", text),
                features=features,
                checksums={path: checksums.integer(path, 0, 2**32 - 1) for path in sums},
                growth=read_growth(fields.object("growth")) if "growth" in fields else None,
            )
        except ValueError as error:
            raise StoreError(f"the manifest is damaged: {error}") from None


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
    splits: whose codes come before those of the samples' own.

    Raises:
        StoreError: a sample's id cannot be stored.
    """
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
    """The plan with the array widths that these samples require.

    Raises:
        StoreError: a sample's id cannot be stored.
    """
    if len(samples) != plan.n_images:
        raise ValueError(f"{len(samples)} samples for a plan of {plan.n_images} images")
    for name in samples.ids:
        if "\0" in name:
            raise StoreError(f"the sample id {name!r} holds a NUL character; rename that image")
    width = max(len(encode_id(name)) for name in samples.ids)
    return dataclasses.replace(plan, id_bytes=max(1, width), boxes=samples.boxes is not None)


def by_reason(left_out: Mapping[str, str], shown: int = 3) -> list[str]:
    """`names: reason` lines, one per reason, with at most `shown` names each."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"{few(some, shown)}: {reason}" for reason, some in names.items()]


def few(names: Sequence[str], shown: int = 3) -> str:
    """`a, b, c and 9 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def check_identity(stored: Mapping[str, Any], given: Mapping[str, Any], instead: str = "") -> None:
    """Compare the identity fields in `given` with the store's. instead: what else could be done.

    Raises:
        IdentityMismatch: names every differing field, what is stored and what was given.
    """
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
            lines += _differences(f"{name}.{key}", stored.get(key, ABSENT), given.get(key, ABSENT))
        return lines
    return [] if stored == given else [f"{name} is {_short(stored)}, given {_short(given)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return text[:12]
    return text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 4]} ..."


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
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def encode_id(name: str) -> bytes:
    """A sample's id as bytes; file names that are not UTF-8 keep their bytes."""
    return name.encode("utf-8", "surrogateescape")


def samples_arrays(samples: Samples, manifest: Manifest) -> dict[str, NDArray[Any]]:
    width = manifest.plan.id_bytes
    names = np.array([encode_id(name) for name in samples.ids], f"S{width}")
    codes = {name: code for code, name in enumerate(manifest.splits)}
    boxes = {} if samples.boxes is None else {"samples/box": samples.boxes.astype(np.float32)}
    return {
        **boxes,
        "samples/index": np.asarray(samples.index, np.int64),
        "samples/label": np.asarray(samples.labels, np.int64),
        "samples/split": np.array([codes[name] for name in samples.splits], np.int16),
        "samples/id": names.view(np.uint8).reshape(len(samples), width),
    }


def check_samples(arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]) -> None:
    """Refuse arrays that `samples_arrays` cannot have written.

    Raises:
        ValueError: a code without a split, a label below -1, or an invalid box.
    """
    codes, labels = arrays["samples/split"], arrays["samples/label"]
    if codes.min() < 0 or codes.max() >= len(splits):
        raise ValueError(f"codes {codes.min()} to {codes.max()} of {len(splits)} splits")
    if labels.min() < -1:
        raise ValueError(f"the label {labels.min()}")
    boxes = arrays.get("samples/box")
    if boxes is not None:
        whole = np.isnan(boxes).all(1)
        empty = ~(boxes[:, :2] < boxes[:, 2:]).all(1) | ~np.isfinite(boxes).all(1)
        if (empty & ~whole).any():
            raise ValueError(f"the box {boxes[empty & ~whole][0].tolist()}")


def decode_ids(encoded: NDArray[np.uint8]) -> list[str]:
    """The ids of `samples/id`, (images, bytes)."""
    names = np.ascontiguousarray(encoded).view(f"S{encoded.shape[1]}").ravel()
    return [name.decode("utf-8", "surrogateescape") for name in names.tolist()]


def samples_from_arrays(arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]) -> Samples:
    """The samples that `samples_arrays` wrote.

    Raises:
        ValueError: see `check_samples`.
    """
    check_samples(arrays, splits)
    return Samples(
        index=arrays["samples/index"],
        ids=decode_ids(arrays["samples/id"]),
        labels=arrays["samples/label"],
        splits=[splits[code] for code in arrays["samples/split"].tolist()],
        boxes=arrays.get("samples/box"),
    )

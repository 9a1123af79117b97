"""The facts about stores and results that a report says in words: provenance, and cautions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitsee_core.pages.report.materials import FoundStore, Materials
from vitsee_core.pages.report.redrawing import Result
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.tables.results import ResultFile
from vitsee_core.tables.words import example_noun
from vitsee_core.types import pl
from vitsee_stores.manifest import by_reason
from vitsee_stores.plan import CLIPS

FEW_IMAGES = 1000
SHOWN_STEPS = 5  # of a training, by name
HASH_CHARACTERS = 12  # of a hash that are shown


def store_facts(store: FoundStore) -> list[tuple[str, str]]:
    """Return (name, text) of a store: model, weights, data, preprocessing, fingerprints."""
    record = store.record
    info = record["info"]
    weights = _mapping(record["model"].get("weights"))
    examples = example_noun(record)
    versions = [
        f"{name} {_text(version)}"
        for name, version in _mapping(info.get("versions")).items()
    ]
    facts = [
        ("Model", _model_text(record["model"])),
        ("Weights", f"{record['weights']} {_short_hash(weights.get('sha256'))}".strip()),
        ("Data", _text(_mapping(info.get("data")).get("data"))),
        (examples.capitalize(), _images_text(record, examples)),
        ("Preprocessing", _preprocessing_text(record["transform"] or {})),
        ("Kept", _contents_text(record)),
        ("Size", human_bytes(record["size_bytes"])),
        ("Self-check", _selfcheck_text(_mapping(record["selfcheck"]))),
        ("Left out", "; ".join(by_reason(record["left_out"]))),
        ("Store", _short_hash(record["store_id"])),
        (
            f"{examples.capitalize()}' fingerprint",
            _short_hash(record["samples_fingerprint"]),
        ),
        ("Versions", ", ".join(versions)),
    ]
    return [(name, text) for name, text in facts if text]


def _model_text(model: Mapping[str, Any]) -> str:
    """Return `name (architecture, 22.1 M parameters)`, as far as that is known."""
    name = _text(model.get("name"))
    architecture = _text(model.get("architecture"))
    details = []
    if architecture and architecture != name:
        details.append(architecture)
    if isinstance(model.get("n_params"), int):
        details.append(f"{model['n_params'] / 1e6:.3g} M parameters")
    return f"{name} ({', '.join(details)})" if details else name


def _images_text(record: Mapping[str, Any], examples: str) -> str:
    """Return `1,000 images, 2 of them unreadable of 10 classes (order shuffled, seed 0)`."""
    text = plural(record["n_images"], examples)
    n_unread = _n_unread(record)
    if n_unread:
        text += f", {n_unread} of them unreadable"
    if record["class_names"]:
        text += f" of {plural(len(record['class_names']), 'classes')}"
    selection = _mapping(record["info"].get("selection"))
    order = []
    if selection.get("order") is not None:
        order.append(f"order {selection['order']}")
    if selection.get("seed") is not None:
        order.append(f"seed {selection['seed']}")
    return f"{text} ({', '.join(order)})" if order else text


def _n_unread(record: Mapping[str, Any]) -> int:
    """Return how many images of a complete store could not be read; 0 while it is not complete."""
    if record["n_valid"] is None or not record["complete"]:
        return 0
    return int(record["n_images"] - record["n_valid"])


def _preprocessing_text(transform: Mapping[str, Any]) -> str:
    """Return input size, resizing, crop and normalisation in words."""
    texts = []
    size = transform.get("input_size")
    if isinstance(size, list) and len(size) == 3:  # channels, height, width
        texts.append(f"{size[1]} × {size[2]} px")
    prefixes = {
        "interpolation": "",
        "processor": "resized by ",
        "crop_mode": "crop ",
        "crop_pct": "crop share ",
    }
    for name, prefix in prefixes.items():
        value = transform.get(name)
        if value is None:
            continue
        if isinstance(value, float):
            value = round(value, 4)
        texts.append(f"{prefix}{_text(value)}")
    for name, values in (("mean", transform.get("mean")), ("std", transform.get("std"))):
        if isinstance(values, list):
            channels = [_text(value) for value in values]
            if len({*channels}) == 1:  # equal channels: once
                channels = channels[:1]
            texts.append(f"{name} {', '.join(channels)}")
    return ", ".join(texts)


def _contents_text(record: Mapping[str, Any]) -> str:
    """Return what the store holds of each image, in words."""
    attention = record["attention"]
    level = attention["level"] if attention["groups"] else "none"
    texts = [plural(len(record["sites"]), "sites"), f"attention: {level}"]
    if record["residual"]:
        texts.append(f"{len(record['residual'])} residual branches")
    if record["erf"]:
        texts.append("receptive fields")
    if record["inputs"]:
        texts.append("pixels")
    return ", ".join(texts)


def _selfcheck_text(selfcheck: Mapping[str, Any]) -> str:
    """Return the largest differences that the proofs of the sites met."""
    texts = []
    output_difference = selfcheck.get("output_max_abs_difference")
    if isinstance(output_difference, (int, float)):
        texts.append(f"output unchanged by the hooks to {output_difference:.1g}")
    proofs = {"sums": "branches add up to", "attention": "attention gives heads to"}
    for name, words in proofs.items():
        largest = _mapping(selfcheck.get(name)).get("max")
        if isinstance(largest, (int, float)):
            texts.append(f"{words} {largest:.1g}")
    return ", ".join(texts)


def _short_hash(value: Any) -> str:
    """Return the beginning of a hash; "" if there is none."""
    return _text(value)[:HASH_CHARACTERS]


def _text(value: Any) -> str:
    """Return a value of JSON as text, "" for null."""
    return "" if value is None else str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: a manifest may be a stranger's."""
    return value if isinstance(value, Mapping) else {}


# ------------------------------------------------------------------------------------ cautions


def steps_without_values(records: Sequence[ResultFile]) -> list[str]:
    """Return a line for each step of a training that was not measured, with the reason.

    Beyond the first `SHOWN_STEPS` of a training a line says how many more there are.
    """
    lines = []
    for record in records:
        rows = record.table.frame.filter(pl.col("status") != "measured")
        unit = str(record.table.notes.get("unit", "step"))
        training = record.path.parent.name
        for row in rows.head(SHOWN_STEPS).iter_rows(named=True):
            reason = f": {row['note']}" if row.get("note") else ""
            lines.append(f"{training}, {unit} {row.get(unit)} {row['status']}{reason}.")
        if len(rows) > SHOWN_STEPS:
            n_more = len(rows) - SHOWN_STEPS
            lines.append(f"{training}: {n_more} more {unit}s without values.")
    return lines


def cautions(materials: Materials) -> list[str]:
    """Return the cautions that a reader of all these results should know first, a line each."""
    lines = []
    for store in materials.stores:
        lines += _store_cautions(store)
    lines += _few_images_caution(materials.results)
    # The stores of the report tell whether a result is older than its store.
    stores = {store.record["store_id"]: store for store in materials.stores}
    for result in materials.results:
        name = result.file.path.name
        lines += [f"{name}: {line}" for line in result_cautions(result, stores)]
    return lines


def _store_cautions(store: FoundStore) -> list[str]:
    """Return what is unfinished, unproven or unread in a store."""
    record = store.record
    lines = []
    if not record["complete"]:
        n_committed = record["n_committed"]
        slabs = plural(record["n_slabs"], "slabs")
        lines.append(
            f"{store.name} is not complete: {n_committed} of {slabs} are committed."
        )
    if not record["selfcheck"]:
        lines.append(
            f"{store.name} has no self-check: its sites were not proven on pixels."
        )
    n_unread = _n_unread(record)
    if n_unread:
        images = f"{record['n_images']} {example_noun(record)} of {store.name}"
        lines.append(f"{n_unread} of the {images} could not be read.")
    return lines


def _few_images_caution(results: Sequence[Result]) -> list[str]:
    """Return a line if some results are of fewer than `FEW_IMAGES` images; else none."""
    counts = {n for n in map(n_images, results) if n and n < FEW_IMAGES}
    if not counts:
        return []
    has_clips = any(r.file.table.notes.get("examples") == CLIPS for r in results)
    examples = "examples" if has_clips else "images"
    n = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
    return [
        f"Some results are of few {examples} ({n}): look at the intervals before you "
        "believe small differences."
    ]


def result_cautions(result: Result, stores: Mapping[str, FoundStore]) -> list[str]:
    """Return the cautions about one result.

    Args:
        result: with its sidecar.
        stores: those of the report, by their id.
    """
    lines = []
    if result.file.changed:
        lines.append("table or sidecar were changed after the command had written them.")
    for entry in stores_of(result):
        label = _text(entry.get("label"))
        if entry.get("complete") is False:
            lines.append(f"made from an unfinished store ({label}, --allow-partial).")
        if not stores:
            continue
        store = stores.get(_text(entry.get("store_id")))
        if store is None:
            # A store of that name, but another one.
            if any(other.name == label for other in stores.values()):
                lines.append(
                    f"the store {label} was made anew since: these are older numbers."
                )
            continue
        current = store.record["generation"]
        generation = entry.get("generation", 1)
        if generation != current:
            lines.append(
                f"made from generation {_text(generation)} of {label}, which has "
                f"{current}."
            )
    left_out = result.file.table.notes.get("left_out")
    if isinstance(left_out, dict):
        lines += [f"left out {name}: {reason}." for name, reason in left_out.items()]
    # A reason may end with a full stop of its own.
    return [line.replace("..", ".") for line in lines]


def stores_of(result: Result) -> list[Mapping[str, Any]]:
    """Return the entries of the sidecar about the stores that a result was computed from."""
    entries = result.file.sidecar.get("stores", ())
    return [entry for entry in entries if isinstance(entry, dict)]


def n_images(result: Result) -> int | None:
    """Return how many images are behind a result; None if the table does not say.

    It is the largest number behind any value: some values may have none that counts for them.
    """
    rows = result.file.table.frame
    if "n_images" not in rows.columns:
        return None
    n: Any = rows["n_images"].max()
    return int(n) if n and n > 0 else None

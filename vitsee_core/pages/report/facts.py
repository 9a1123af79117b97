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
MOST_STEPS = 5  # of a training that are named
SHORT = 12  # letters of a hash that are shown


def store_facts(store: FoundStore) -> list[tuple[str, str]]:
    """(what, how it is) of a store: model, weights, data, preprocessing, fingerprints."""
    record = store.record
    model = record["model"]
    info = record["info"]
    transform = record["transform"] or {}
    weights = _mapping(model.get("weights"))
    selection = _mapping(info.get("selection"))
    examples = example_noun(record)
    images = plural(record["n_images"], examples)
    if record["n_valid"] is not None and record["complete"]:
        unread = record["n_images"] - record["n_valid"]
        images += f", {unread} of them unreadable" if unread else ""
    if record["class_names"]:
        images += f" of {plural(len(record['class_names']), 'classes')}"
    order = ", ".join(
        f"{name} {selection[name]}"
        for name in ("order", "seed")
        if selection.get(name) is not None
    )
    facts = [
        ("Model", _named(model)),
        ("Weights", " ".join([record["weights"], _hash(weights.get("sha256"))]).strip()),
        ("Data", _text(_mapping(info.get("data")).get("data"))),
        (examples.capitalize(), f"{images} ({order})" if order else images),
        ("Preprocessing", _preprocessing(transform)),
        ("Kept", _kept(record)),
        ("Size", human_bytes(record["size_bytes"])),
        ("Self-check", _selfcheck(_mapping(record["selfcheck"]))),
        ("Left out", "; ".join(by_reason(record["left_out"]))),
        ("Store", _hash(record["store_id"])),
        (f"{examples.capitalize()}' fingerprint", _hash(record["samples_fingerprint"])),
        (
            "Versions",
            ", ".join(
                f"{n} {_text(v)}" for n, v in _mapping(info.get("versions")).items()
            ),
        ),
    ]
    return [(name, text) for name, text in facts if text]


def _named(model: Mapping[str, Any]) -> str:
    name = _text(model.get("name"))
    architecture = _text(model.get("architecture"))
    parts = [architecture] if architecture and architecture != name else []
    if isinstance(model.get("n_params"), int):
        parts.append(f"{model['n_params'] / 1e6:.3g} M parameters")
    return f"{name} ({', '.join(parts)})" if parts else name


def _preprocessing(transform: Mapping[str, Any]) -> str:
    size = transform.get("input_size")
    parts = (
        [f"{size[1]} × {size[2]} px"] if isinstance(size, list) and len(size) == 3 else []
    )
    for name, label in (
        ("interpolation", ""),
        ("processor", "resized by "),
        ("crop_mode", "crop "),
        ("crop_pct", "crop share "),
    ):
        if transform.get(name) is not None:
            value = transform[name]
            value = round(value, 4) if isinstance(value, float) else value
            parts.append(f"{label}{_text(value)}")
    for name in ("mean", "std"):
        values = transform.get(name)
        if isinstance(values, list):
            alike = len({*map(_text, values)}) == 1
            parts.append(
                f"{name} {', '.join(map(_text, values[:1] if alike else values))}"
            )
    return ", ".join(parts)


def _kept(record: Mapping[str, Any]) -> str:
    level = record["attention"]["level"] if record["attention"]["groups"] else "none"
    parts = [plural(len(record["sites"]), "sites"), f"attention: {level}"]
    if record["residual"]:
        parts.append(f"{len(record['residual'])} residual branches")
    if record["erf"]:
        parts.append("receptive fields")
    if record["inputs"]:
        parts.append("pixels")
    return ", ".join(parts)


def _selfcheck(found: Mapping[str, Any]) -> str:
    """The largest differences that the proofs met."""
    parts = []
    if isinstance(found.get("output_max_abs_difference"), (int, float)):
        parts.append(
            f"output unchanged by the hooks to {found['output_max_abs_difference']:.1g}"
        )
    for name, what in (
        ("sums", "branches add up to"),
        ("attention", "attention gives heads to"),
    ):
        worst = _mapping(found.get(name)).get("max")
        if isinstance(worst, (int, float)):
            parts.append(f"{what} {worst:.1g}")
    return ", ".join(parts)


def _hash(value: Any) -> str:
    return _text(value)[:SHORT]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ------------------------------------------------------------------------------------ cautions


def steps_without_values(records: Sequence[ResultFile]) -> list[str]:
    """The steps of trainings that were not measured, and why, a line each; the first `MOST_STEPS`
    of each training."""
    found = []
    for record in records:
        rows = record.table.frame.filter(pl.col("status") != "measured")
        unit = str(record.table.notes.get("unit", "step"))
        place = record.path.parent.name
        for row in rows.head(MOST_STEPS).iter_rows(named=True):
            why = f": {row['note']}" if row.get("note") else ""
            found.append(f"{place}, {unit} {row.get(unit)} {row['status']}{why}.")
        if len(rows) > MOST_STEPS:
            found.append(
                f"{place}: {len(rows) - MOST_STEPS} more {unit}s without values."
            )
    return found


def cautions(materials: Materials) -> list[str]:
    """The cautions that a reader of all these results should know first."""
    found = []
    for store in materials.stores:
        record = store.record
        if not record["complete"]:
            done = record["n_committed"]
            of = record["n_slabs"]
            slabs = plural(of, "slabs")
            found.append(
                f"{store.name} is not complete: {done} of {slabs} are committed."
            )
        if not record["selfcheck"]:
            found.append(
                f"{store.name} has no self-check: its sites were not proven on pixels."
            )
        if record["n_valid"] is not None and record["complete"]:
            unread = record["n_images"] - record["n_valid"]
            if unread:
                of = record["n_images"]
                found.append(
                    f"{unread} of the {of} {example_noun(record)} of {store.name} could "
                    "not be read."
                )
    few = {
        n for result in materials.results if (n := n_images(result)) and n < FEW_IMAGES
    }
    if few:
        of_clips = any(
            r.file.table.notes.get("examples") == CLIPS for r in materials.results
        )
        what = "examples" if of_clips else "images"
        most = f"{min(few)} to {max(few)}" if len(few) > 1 else f"{min(few)}"
        found.append(
            f"Some results are of few {what} ({most}): look at the intervals before you "
            "believe small differences."
        )
    known = {store.record["store_id"]: store for store in materials.stores}
    for result in materials.results:
        found += [
            f"{result.file.path.name}: {line}" for line in result_cautions(result, known)
        ]
    return found


def result_cautions(result: Result, known: Mapping[str, FoundStore]) -> list[str]:
    """The cautions about one result. known: the report's stores, by their id."""
    found = []
    if result.file.changed:
        found.append("table or sidecar were changed after the command had written them.")
    for store in stores_of(result):
        label = _text(store.get("label"))
        if store.get("complete") is False:
            found.append(f"made from an unfinished store ({label}, --allow-partial).")
        if known and _text(store.get("store_id")) not in known:
            same = [s for s in known.values() if s.name == label]
            if same:
                found.append(
                    f"the store {label} was made anew since: these are older numbers."
                )
        elif known:
            here = known[_text(store.get("store_id"))].record["generation"]
            if (then := store.get("generation", 1)) != here:
                found.append(
                    f"made from generation {_text(then)} of {label}, which has {here}."
                )
    left_out = result.file.table.notes.get("left_out")
    if isinstance(left_out, dict):
        found += [f"left out {name}: {reason}." for name, reason in left_out.items()]
    return [line.replace("..", ".") for line in found]


def stores_of(result: Result) -> list[Mapping[str, Any]]:
    """The entries of the sidecar about the stores that a result is of, as far as it has them."""
    return [one for one in result.file.sidecar.get("stores", ()) if isinstance(one, dict)]


def n_images(result: Result) -> int | None:
    """The images behind a result, as most of them as are behind any value (some have none that
    counts for them); None where it does not say."""
    rows = result.file.table.frame
    most: Any = rows["n_images"].max() if "n_images" in rows.columns else None
    return int(most) if most and most > 0 else None

"""vitsee info: what a store contains and how it was made."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.sections import STORES
from vitsee_cli.values import parse_place
from vitsee_core.runtime.command_lines import resuming
from vitsee_core.runtime.machine import plural
from vitsee_core.tables.text import visible
from vitsee_core.tables.words import examples_of
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Place

QUESTION = STORES

FIELD_WIDTH = 100  # characters of JSON on one line
SHOWN_LABELS = 6
LOADED = ("source", "key", "layout", "assumed", "missing", "unexpected")  # of the weights
CANVAS = ("size", "tiles", "min_pixels", "max_pixels", "own_grids")
SHOWN_RUNS = 8  # of missing slabs


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=parse_place)
@click.option(
    "-f",
    "--field",
    metavar="FIELD",
    help="Print one field alone, by its dotted path in --json.  [default: all]",
)
@options.json_option
def command(stores: tuple[Place, ...], field: str | None, as_json: bool) -> None:
    """Show what stores contain and how they were made.

    Reads no activations and imports no models; unfinished stores are described as far as they go.
    For several stores: a table, a list with --json, or one field with the store before it.

    \b
      $ vitsee info b16.zarr
      $ vitsee info b16.zarr -f complete
      true
      $ vitsee info b16.zarr -f sites.blocks.3.out.shape
      [197, 768]
      $ vitsee info b16.zarr --json | jq .left_out
      $ vitsee info runs/*.zarr
      $ vitsee info runs/*.zarr -f n_committed
    """
    if as_json and field is not None:
        raise click.UsageError("--json and --field exclude each other")
    from vitsee_stores import describe

    console.require_stdout()
    records = []
    for store in stores:
        with console.slab_progress(f"info {store}") as report:
            records.append(describe(store, report))
    if field is not None:
        texts = [_field_text(find(record, field)) for record in records]
        for store, text in zip(stores, texts, strict=True):
            console.out(text if len(stores) == 1 else f"{visible(str(store))}\t{text}")
    elif as_json:
        console.out(json.dumps(records if len(records) > 1 else records[0], indent=2))
    elif len(records) > 1:
        show_together(records)
    else:
        show(records[0])


def _field_text(value: Any) -> str:
    """Text as it is; else JSON, indented where it is long."""
    if isinstance(value, str):
        return value
    line = json.dumps(value)
    if len(line) <= FIELD_WIDTH:
        return line
    return json.dumps(value, indent=2)


def find(record: Any, field: str) -> Any:
    """The value at a dotted path; a key may hold dots itself (`sites.blocks.3.out`). Raises
    VitseeError: there is none; names what is there."""
    value = record
    rest = field.split(".")
    while rest:
        for n in range(len(rest), 0, -1):
            key = ".".join(rest[:n])
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                continue
            rest = rest[n:]
            break
        else:
            raise VitseeError(f"no field {field!r}; {_instead(value, rest[0])}")
    return value


def _instead(value: Any, key: str) -> str:
    if isinstance(value, Mapping):
        names = (
            difflib.get_close_matches(key, list(map(str, value)), n=3) or list(value)[:20]
        )
        return (
            f"there is: {', '.join(map(str, names)) or 'nothing'} (run: vitsee info "
            "STORE --json)"
        )
    if isinstance(value, list):
        return f"the list there has {len(value)} entries, counted from 0"
    return f"{json.dumps(value)} has no fields of its own"


def show(record: Mapping[str, Any]) -> None:
    from rich.table import Table

    for name, text in _facts(record):
        console.out(f"{name:<10} {visible(text)}")
    console.out("")
    sites = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("site", "shape", "grid", "prefix", "dtype", "tokens"):
        sites.add_column(title, overflow="fold")
    for title in ("depth", "size"):
        sites.add_column(title, justify="right")
    for name, site in record["sites"].items():
        sites.add_row(*map(visible, _site_cells(name, site, record["arrays"])))
    console.stdout().print(sites, markup=False)


def show_together(records: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    lines = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("store", "model", "weights", "data", "attention"):
        lines.add_column(title, overflow="fold")
    for title in ("classes", "images", "slabs", "sites", "sublayers", "size"):
        lines.add_column(title, justify="right")
    for record in records:
        slabs = f"{record['n_committed']}/{record['n_slabs']}"
        cells = (
            record["path"],
            str(record["model"].get("name", "")),
            record["weights"],
            str(record["info"].get("data", {}).get("data", "")),
            str(record["attention"]["level"])
            if record["attention"]["groups"]
            else "none",
            *(str(len(record[of] or ())) for of in ("class_names",)),
            str(record["n_images"]),
            slabs if record["complete"] else f"{slabs}, unfinished",
            str(len(record["sites"])),
            str(len(record["residual"])),
            console.human_bytes(record["size_bytes"]),
        )
        lines.add_row(*map(visible, cells))
    console.stdout().print(lines, markup=False)


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    from vitsee_stores.manifest import by_reason

    model = record["model"]
    weights = record["model"].get("weights", {})
    identity = record["identity"]
    data = record["info"].get("data", {})
    transform = record["transform"]
    erf = record["erf"]
    every = plural(record["n_slabs"], "slabs")
    examples = examples_of(record)
    slabs = f"{record['n_committed']} of {every} of {plural(record['slab'], examples)}"
    rows = plural(record["n_images"], examples)
    if record["n_valid"] is not None:
        rows += f", {record['n_valid']} of them stored and readable"
    unread = [name for name in ("n_valid", "labels") if record[name] is None]
    damaged = f"{', '.join(unread)} (run: vitsee validate --deep {record['path']})"
    facts = [
        (
            "store",
            f"{record['path']} (format {record['format']}, id {record['store_id'][:12]})",
        ),
        ("status", f"{'complete' if record['complete'] else 'unfinished'}: {slabs}"),
        ("damaged", damaged if unread else ""),
        *(("generation", _generation(one, record)) for one in record["generations"][1:]),
        ("missing", _missing(record["missing"])),
        *(("claimed", _claim(claim)) for claim in record["claimed"]),
        ("resumed by", "" if record["complete"] else _resumed_by(record)),
        (examples, rows),
        ("data", _listed(data, ("data", "split", "per_class"))),
        ("order", _listed(identity, ("order", "seed"))),
        ("size", f"{console.human_bytes(record['size_bytes'])}, codec {record['codec']}"),
        ("model", model.get("name", "")),
        ("built as", _listed(model, ("architecture", "args", "input_size", "n_params"))),
        ("weights", record["weights"]),
        ("no skip in", ", ".join(model.get("ablate_skip", ()))),
        ("changed", "; ".join(model.get("interventions", ()))),
        ("loaded", _listed(weights, LOADED)),
        ("transform", _listed(transform, [key for key in transform if key != "clip"])),
        ("precision", str(identity.get("precision", ""))),
        ("attention", _attention(record["attention"])),
        ("residual", _count(record["residual"], "sublayers")),
        ("canvas", _listed(record["canvas"] or {}, CANVAS)),
        ("frames", _clips(record.get("clip"))),
        ("inputs", "x".join(map(str, record["inputs"] or ()))),
        ("grams", _grams(record)),
        (
            "erf",
            erf and f"{_count(erf['sites'], 'sites')}, first {erf['n_images']} images",
        ),
        ("classes", _count(record["class_names"] or (), "classes")),
        ("labels", _labels(record["labels"] or (), examples)),
    ]
    facts += [("left out", line) for line in by_reason(record["left_out"])]
    for maker in record["made_by"]:
        command = str(maker.get("command", "unknown"))
        where = _listed(maker, ("host", "device", "shard"))
        facts.append(
            (
                "made by",
                f"{command} ({plural(maker['n_slabs'], 'slabs')}{where and ', ' + where})",
            )
        )
    return [(name, text) for name, text in facts if text]


def _clips(clip: Mapping[str, Any] | None) -> str:
    """`16 frames of each, every 4, shuffled, one by one`."""
    if clip is None:
        return ""
    every = "evenly spread" if clip["every"] is None else f"every {clip['every']}"
    one_by_one = ", one by one" if clip["by_frame"] else ""
    return (
        f"{plural(clip['frames'], 'frames')} of each, {every}, {clip['time']}{one_by_one}"
    )


def _missing(runs: Sequence[Sequence[int]]) -> str:
    """`slabs 0, 3 to 7`, of runs (first, last); after some of them how many more there are."""
    if not runs:
        return ""
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:SHOWN_RUNS]]
    left = sum(b - a + 1 for a, b in runs[SHOWN_RUNS:])
    more = f" and {left} more (-f missing)" if left else ""
    return f"slabs {', '.join(shown)}{more}"


def _generation(one: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """`2 adds 7 sites (blocks.0.norm1, ...), 3.1 MB, 2026-01-01T00:00:00Z: vitsee extract ...`."""
    from vitsee_stores.manifest import abbreviate

    before = record["generations"][one["number"] - 2]["rows"][1]
    first, last = one["rows"]
    what = f"{_count(one['sites'], 'sites')} ({abbreviate(one['sites'])})"
    if last > before:
        again = f", and has rows {first} to {before} anew" if first <= before else ""
        what = f"rows {before + 1} to {last}{again}"
    when = one["committed"]
    if not one["complete"]:
        done = f"{one['n_committed']} of {plural(one['n_slabs'], 'slabs')}"
        when = f"being added ({done}), not read yet"
    size = console.human_bytes(one["size_bytes"])
    return f"{one['number']} adds {what}, {size}, {when}: {one['command'] or 'unknown'}"


def _claim(claim: Mapping[str, Any]) -> str:
    """`slabs 3, 4 by process 812 on node7, last heard of 2026-01-01T00:00:00Z`."""
    slabs = _missing([(slab, slab) for slab in claim["slabs"]])
    return f"{slabs} by process {claim['pid']} on {claim['host']}, last heard of {claim['time']}"


def _resumed_by(record: Mapping[str, Any]) -> str:
    """The command that makes the missing slabs, for the folder that this process is in."""
    info = record["info"]
    path = record["path"]
    folder = info.get("data_folder")
    here = os.getcwd()
    elsewhere = isinstance(folder, str) and folder != here
    store = os.path.abspath(path) if elsewhere and "://" not in path else path
    line = resuming(str(info.get("command", "")), store)
    if line is None:
        return "the same vitsee extract, or vitsee.extract, as before"
    if elsewhere:
        return f"cd {shlex.quote(folder)} && {line}"
    return line


def _site_cells(
    name: str, site: Mapping[str, Any], arrays: Mapping[str, Any]
) -> list[str]:
    shape = "x".join(map(str, site["shape"]))
    if "alias_of" in site:
        return [name, shape, "", "", "", "", "", f"= {site['alias_of']}"]
    below = tuple(f"{folder}/{name}/" for folder in ("acts", "pooled", "grams"))
    whole = (f"vectors/{name}", f"erf/{name}")
    size = sum(
        a["size_bytes"]
        for path, a in arrays.items()
        if path.startswith(below) or path in whole
    )
    return [
        name,
        shape,
        _grid(site),
        _prefix(site.get("prefix", ())),
        site["dtype"],
        site["tokens"],
        str(site["depth"]),
        console.human_bytes(size),
    ]


def _grid(layout: Mapping[str, Any]) -> str:
    """`14x14`, of clips with the cells in time before it: `8x14x14`."""
    times = [layout["frames"]] if "frames" in layout else []
    return "x".join(map(str, [*times, *(layout.get("grid") or ())]))


def _prefix(names: Sequence[str]) -> str:
    """`cls reg0`; of frames one by one `cls x 16`, with their number."""
    kinds = Counter(re.sub(r"\.[0-9]+$", "", name) for name in names)
    return " ".join(kind if n == 1 else f"{kind} x {n}" for kind, n in kinds.items())


def _attention(attention: Mapping[str, Any]) -> str:
    if not attention["groups"]:
        return "none"
    parts = [attention["level"]]
    for group in attention["groups"]:
        heads = "/".join(str(n) for n in dict.fromkeys(group["n_heads"]))
        window = " x ".join(map(str, group.get("window", ())))
        within = f", within windows of {window} cells" if window else ""
        blocks = _count(group["blocks"], "blocks")
        parts.append(f"{blocks} of {heads} heads on a {_grid(group)} grid{within}")
    return ", ".join([*parts, *(["rollout"] if attention["rollout"] else [])])


def _labels(labels: Sequence[Mapping[str, Any]], examples: str) -> str:
    """`even 5, odd 5`; for many labels the range of their counts."""
    if all(label["label"] is None for label in labels):
        return ""
    named = [
        f"{'none' if one['label'] is None else one['name'] or one['label']} {one['n_images']}"
        for one in labels
    ]
    if len(named) <= SHOWN_LABELS:
        return ", ".join(named)
    counts = [one["n_images"] for one in labels]
    low = min(counts)
    high = max(counts)
    each = plural(low, examples) if low == high else f"{low} to {high} {examples}"
    return f"{len(named)} labels, {each} each (-f labels)"


def _grams(record: Mapping[str, Any]) -> str:
    if not record["grams"]:
        return ""
    slabs = f"{record['slab']} {examples_of(record)}"
    return f"{_count(record['grams'], 'sites')}, within slabs of {slabs}"


def _listed(record: Mapping[str, Any] | None, keys: Sequence[str]) -> str:
    """`key value, key value` of the entries that are not empty; the first without its key."""
    record = record or {}
    kept = [
        (key, record[key]) for key in keys if record.get(key) not in (None, "", [], {})
    ]
    texts = [(key, v if isinstance(v, str) else json.dumps(v)) for key, v in kept]
    return ", ".join(v if key == keys[0] else f"{key} {v}" for key, v in texts)


def _count(items: Any, nouns: str) -> str:
    """`3 blocks`; empty for none."""
    return plural(len(items), nouns) if items else ""

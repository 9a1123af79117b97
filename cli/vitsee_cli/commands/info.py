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
from vitsee_core.tables.words import example_noun
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Place

QUESTION = STORES

FIELD_WIDTH = 100  # characters of JSON on one line
MAX_LABELS = 6  # more are summed up
# Keys of records that are printed, in this order.
MODEL_KEYS = ("architecture", "args", "input_size", "n_params")
WEIGHTS_KEYS = ("source", "key", "layout", "assumed", "missing", "unexpected")
CANVAS_KEYS = ("size", "tiles", "min_pixels", "max_pixels", "own_grids")
MAX_RUNS = 8  # of missing slabs


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

    # Checked before the stores are read, which takes long for many slabs.
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
    """Return a text as it is, and any other value as JSON, indented if it is long."""
    if isinstance(value, str):
        return value
    line = json.dumps(value)
    if len(line) <= FIELD_WIDTH:
        return line
    return json.dumps(value, indent=2)


def find(record: Any, field: str) -> Any:
    """Return the value at a dotted path.

    A key may have dots itself: `sites.blocks.3.out` is the key `blocks.3.out` of `sites`.

    Raises:
        VitseeError: there is no such value; names the fields beside it.
    """
    value = record
    words = field.split(".")
    while words:
        # The longest key first, so that one with dots is found.
        for n_words in range(len(words), 0, -1):
            key = ".".join(words[:n_words])
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                continue
            words = words[n_words:]
            break
        else:
            raise VitseeError(f"no field {field!r}; {_available_fields(value, words[0])}")
    return value


def _available_fields(value: Any, key: str) -> str:
    """Return which fields a value has, for the message about an unknown key."""
    if isinstance(value, Mapping):
        names = difflib.get_close_matches(key, [str(name) for name in value], n=3)
        if not names:
            names = [str(name) for name in value][:20]
        return (
            f"there is: {', '.join(names) or 'nothing'} (run: vitsee info STORE --json)"
        )
    if isinstance(value, list):
        return f"the list there has {len(value)} entries, counted from 0"
    return f"{json.dumps(value)} has no fields of its own"


def show(record: Mapping[str, Any]) -> None:
    """Print what `describe` says of a store: facts, a line each, and a table of its sites."""
    from rich.table import Table

    for name, text in _fact_lines(record):
        console.out(f"{name:<10} {visible(text)}")
    console.out("")
    sites = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("site", "shape", "grid", "prefix", "dtype", "tokens"):
        sites.add_column(title, overflow="fold")
    for title in ("depth", "size"):
        sites.add_column(title, justify="right")
    for name, site in record["sites"].items():
        sites.add_row(*map(visible, _site_row(name, site, record["arrays"])))
    # Without markup: rich would read `[...]` in a name or path as a style.
    console.stdout().print(sites, markup=False)


def show_together(records: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row per store."""
    from rich.table import Table

    lines = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("store", "model", "weights", "data", "attention"):
        lines.add_column(title, overflow="fold")
    for title in ("classes", "images", "slabs", "sites", "sublayers", "size"):
        lines.add_column(title, justify="right")
    for record in records:
        slabs = f"{record['n_committed']}/{record['n_slabs']}"
        if not record["complete"]:
            slabs += ", unfinished"
        attention = "none"
        if record["attention"]["groups"]:
            attention = str(record["attention"]["level"])
        cells = (
            record["path"],
            str(record["model"].get("name", "")),
            record["weights"],
            str(record["info"].get("data", {}).get("data", "")),
            attention,
            str(len(record["class_names"] or ())),
            str(record["n_images"]),
            slabs,
            str(len(record["sites"])),
            str(len(record["residual"])),
            console.human_bytes(record["size_bytes"]),
        )
        lines.add_row(*map(visible, cells))
    # Without markup, as in `show`: paths may have brackets.
    console.stdout().print(lines, markup=False)


def _fact_lines(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the lines about a store, without those that have nothing to say."""
    from vitsee_stores.manifest import by_reason

    facts = [*_state_facts(record), *_model_facts(record), *_content_facts(record)]
    facts += [("left out", line) for line in by_reason(record["left_out"])]
    for maker in record["made_by"]:
        command = str(maker.get("command", "unknown"))
        details = plural(maker["n_slabs"], "slabs")
        machine = _entries_text(maker, ("host", "device", "shard"))
        if machine:
            details += f", {machine}"
        facts.append(("made by", f"{command} ({details})"))
    return [(name, text) for name, text in facts if text]


def _state_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of how far a store is, and of its images; texts may be empty."""
    examples = example_noun(record)
    status = "complete" if record["complete"] else "unfinished"
    n_slabs = plural(record["n_slabs"], "slabs")
    slabs = f"{record['n_committed']} of {n_slabs} of {plural(record['slab'], examples)}"
    rows = plural(record["n_images"], examples)
    # `describe` has None for what a damaged file should have said.
    unreadable = []
    if record["n_valid"] is None:
        unreadable.append("n_valid")
    else:
        rows += f", {record['n_valid']} of them stored and readable"
    if record["labels"] is None:
        unreadable.append("labels")
    damaged = ""
    if unreadable:
        command = f"vitsee validate --deep {record['path']}"
        damaged = f"{', '.join(unreadable)} (run: {command})"
    store_id = record["store_id"][:12]
    facts = [
        ("store", f"{record['path']} (format {record['format']}, id {store_id})"),
        ("status", f"{status}: {slabs}"),
        ("damaged", damaged),
    ]
    for generation in record["generations"][1:]:  # the first one is the store itself
        facts.append(("generation", _generation_text(generation, record)))
    facts.append(("missing", _slab_runs_text(record["missing"])))
    facts += [("claimed", _claim_text(claim)) for claim in record["claimed"]]
    if not record["complete"]:
        facts.append(("resumed by", _resume_command(record)))
    data = record["info"].get("data", {})
    size = console.human_bytes(record["size_bytes"])
    return [
        *facts,
        (examples, rows),
        ("data", _entries_text(data, ("data", "split", "per_class"))),
        ("order", _entries_text(record["identity"], ("order", "seed"))),
        ("size", f"{size}, codec {record['codec']}"),
    ]


def _model_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the model, its weights and its input; texts may be empty."""
    model = record["model"]
    transform = record["transform"]
    # The sampling of a clip's frames has a line of its own.
    transform_keys = [key for key in transform if key != "clip"]
    return [
        ("model", model.get("name", "")),
        ("built as", _entries_text(model, MODEL_KEYS)),
        ("weights", record["weights"]),
        ("no skip in", ", ".join(model.get("ablate_skip", ()))),
        ("changed", "; ".join(model.get("interventions", ()))),
        ("loaded", _entries_text(model.get("weights", {}), WEIGHTS_KEYS)),
        ("transform", _entries_text(transform, transform_keys)),
        ("precision", str(record["identity"].get("precision", ""))),
    ]


def _content_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of what is stored beside the sites; texts may be empty."""
    examples = example_noun(record)
    grams = ""
    if record["grams"]:
        n_sites = _count_text(record["grams"], "sites")
        grams = f"{n_sites}, within slabs of {record['slab']} {examples}"
    erf = record["erf"]
    erf_text = ""
    if erf:
        erf_text = f"{_count_text(erf['sites'], 'sites')}, first {erf['n_images']} images"
    return [
        ("attention", _attention_text(record["attention"])),
        ("residual", _count_text(record["residual"], "sublayers")),
        ("canvas", _entries_text(record["canvas"] or {}, CANVAS_KEYS)),
        ("frames", _clip_text(record.get("clip"))),
        ("inputs", "x".join(map(str, record["inputs"] or ()))),
        ("grams", grams),
        ("erf", erf_text),
        ("classes", _count_text(record["class_names"] or (), "classes")),
        ("labels", _labels_text(record["labels"] or (), examples)),
    ]


def _clip_text(clip: Mapping[str, Any] | None) -> str:
    """Return `16 frames of each, every 4, shuffled, one by one`; "" for a store of images."""
    if clip is None:
        return ""
    frames = plural(clip["frames"], "frames")
    stride = "evenly spread" if clip["every"] is None else f"every {clip['every']}"
    text = f"{frames} of each, {stride}, {clip['time']}"
    if clip["by_frame"]:
        text += ", one by one"
    return text


def _slab_runs_text(runs: Sequence[Sequence[int]]) -> str:
    """Return `slabs 0, 3 to 7`, of runs (first, last); after some runs, how many more there are."""
    if not runs:
        return ""
    texts = []
    for first, last in runs[:MAX_RUNS]:
        texts.append(str(first) if first == last else f"{first} to {last}")
    n_more = sum(last - first + 1 for first, last in runs[MAX_RUNS:])
    text = f"slabs {', '.join(texts)}"
    if n_more:
        text += f" and {n_more} more (-f missing)"
    return text


def _generation_text(generation: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return a line about what a later run of extract added to a complete store.

    `2 adds 7 sites (blocks.0.norm1, ...), 3.1 MB, 2026-01-01T00:00:00Z: vitsee extract ...`
    """
    from vitsee_stores.manifest import abbreviate

    sites = generation["sites"]
    # Generations are counted from 1.
    last_row_before = record["generations"][generation["number"] - 2]["rows"][1]
    first_row, last_row = generation["rows"]
    added = f"{_count_text(sites, 'sites')} ({abbreviate(sites)})"
    if last_row > last_row_before:
        added = f"rows {last_row_before + 1} to {last_row}"
        if first_row <= last_row_before:  # its first slab was not full
            added += f", and has rows {first_row} to {last_row_before} anew"
    status = generation["committed"]
    if not generation["complete"]:
        n_slabs = plural(generation["n_slabs"], "slabs")
        status = f"being added ({generation['n_committed']} of {n_slabs}), not read yet"
    size = console.human_bytes(generation["size_bytes"])
    command = generation["command"] or "unknown"
    return f"{generation['number']} adds {added}, {size}, {status}: {command}"


def _claim_text(claim: Mapping[str, Any]) -> str:
    """Return `slabs 3, 4 by process 812 on node7, last heard of 2026-01-01T00:00:00Z`."""
    slabs = _slab_runs_text([(slab, slab) for slab in claim["slabs"]])
    process = f"process {claim['pid']} on {claim['host']}"
    return f"{slabs} by {process}, last heard of {claim['time']}"


def _resume_command(record: Mapping[str, Any]) -> str:
    """Return the command that makes the missing slabs, to be typed in the current folder."""
    info = record["info"]
    store = record["path"]
    # Relative paths of the images refer to the folder in which extract was run.
    folder = info.get("data_folder")
    must_change_folder = isinstance(folder, str) and folder != os.getcwd()
    if must_change_folder and "://" not in store:
        store = os.path.abspath(store)
    line = resuming(str(info.get("command", "")), store)
    if line is None:
        return "the same vitsee extract, or vitsee.extract, as before"
    if must_change_folder:
        return f"cd {shlex.quote(folder)} && {line}"
    return line


def _site_row(name: str, site: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
    """Return the cells of a site's row: name, shape, grid, prefix, dtype, tokens, depth, size."""
    shape = "x".join(map(str, site["shape"]))
    if "alias_of" in site:
        return [name, shape, "", "", "", "", "", f"= {site['alias_of']}"]
    # Each kind of token has an array in these folders; the others are single arrays.
    folders = (f"acts/{name}/", f"pooled/{name}/", f"grams/{name}/")
    single_arrays = (f"vectors/{name}", f"erf/{name}")
    size = sum(
        array["size_bytes"]
        for path, array in arrays.items()
        if path.startswith(folders) or path in single_arrays
    )
    return [
        name,
        shape,
        _grid_text(site),
        _prefix_text(site.get("prefix", ())),
        site["dtype"],
        site["tokens"],
        str(site["depth"]),
        console.human_bytes(size),
    ]


def _grid_text(layout: Mapping[str, Any]) -> str:
    """Return `14x14`, for clips with the number of cells in time before it: `8x14x14`."""
    sizes = [*(layout.get("grid") or ())]
    if "frames" in layout:
        sizes.insert(0, layout["frames"])
    return "x".join(map(str, sizes))


def _prefix_text(names: Sequence[str]) -> str:
    """Return `cls reg0`; if frames were run one by one, with their number: `cls x 16`."""
    kinds = Counter(re.sub(r"\.[0-9]+$", "", name) for name in names)
    return " ".join(kind if n == 1 else f"{kind} x {n}" for kind, n in kinds.items())


def _attention_text(attention: Mapping[str, Any]) -> str:
    """Return `rows, 12 blocks of 3 heads on a 14x14 grid, rollout`; "none" if none is stored."""
    if not attention["groups"]:
        return "none"
    facts = [attention["level"]]
    for group in attention["groups"]:
        # Numbers of heads of the group's blocks, each once: `3/6`.
        heads = "/".join(str(n) for n in dict.fromkeys(group["n_heads"]))
        blocks = _count_text(group["blocks"], "blocks")
        facts.append(f"{blocks} of {heads} heads on a {_grid_text(group)} grid")
        if group.get("window"):
            window = " x ".join(map(str, group["window"]))
            facts.append(f"within windows of {window} cells")
    if attention["rollout"]:
        facts.append("rollout")
    return ", ".join(facts)


def _labels_text(labels: Sequence[Mapping[str, Any]], examples: str) -> str:
    """Return `even 5, odd 5`; for many labels the range of their counts; "" without labels."""
    if all(label["label"] is None for label in labels):
        return ""
    if len(labels) <= MAX_LABELS:
        texts = []
        for label in labels:
            name = "none" if label["label"] is None else label["name"] or label["label"]
            texts.append(f"{name} {label['n_images']}")
        return ", ".join(texts)
    counts = [label["n_images"] for label in labels]
    low = min(counts)
    high = max(counts)
    n_images = plural(low, examples) if low == high else f"{low} to {high} {examples}"
    return f"{len(labels)} labels, {n_images} each (-f labels)"


def _entries_text(record: Mapping[str, Any] | None, keys: Sequence[str]) -> str:
    """Return `VALUE, KEY VALUE, KEY VALUE`: the first key's value alone, others with their keys.

    Entries that are empty are left out.
    """
    texts = []
    for key in keys:
        value = (record or {}).get(key)
        if value in (None, "", [], {}):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        texts.append(text if key == keys[0] else f"{key} {text}")
    return ", ".join(texts)


def _count_text(items: Any, nouns: str) -> str:
    """Return `3 blocks`; "" for none. nouns: a plural."""
    return plural(len(items), nouns) if items else ""

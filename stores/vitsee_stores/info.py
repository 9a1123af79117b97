"""Description of a store from its metadata, without reading its arrays."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np

from vitsee_stores.errors import StoreError, Unreachable
from vitsee_stores.files import Files
from vitsee_stores.folder import files_at
from vitsee_stores.generations import Generation, GrownChunks, committed, read_generations
from vitsee_stores.layout import n_bytes
from vitsee_stores.leases import read_claims
from vitsee_stores.manifest import Manifest
from vitsee_stores.plan import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.sealed import VerifiedChunks
from vitsee_stores.url import Url
from vitsee_stores.weights_names import weights_name


def describe(
    path: str | os.PathLike[str] | Url,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Describe a store, complete or not, in JSON types: everything except its arrays.

    It reads zarr.json, the labels and three small files of each slab. Some of the fields:

        missing      runs (first, last) of uncommitted slabs, counted from 0
        claimed      processes that claim some of these
        n_valid      number of readable images in committed slabs
        size_bytes   uncompressed size of the published generations
        generations  the store as it was made and what was added to it. One that is still
                     being added is listed here, and its claims and makers are included above;
                     the other fields are those of the published generations

    Args:
        path: folder or URL of the store.
        report: called from any thread with the number of examined slabs and of all slabs,
            first with 0.

    Raises:
        StoreError: `path` is missing, not a vitsee store, of another format version, or
            damaged.
    """
    files = files_at(path)
    generations = read_generations(files)
    # Readers do not see the generation that is being added.
    # The first one is the store as it was made, and is described even if it is unfinished.
    published = [generations[0]]
    published += [generation for generation in generations[1:] if generation.published]
    manifest = published[-1].combined
    is_committed = committed(published, marked=True)
    committed_slabs = np.flatnonzero(is_committed).tolist()
    plan = manifest.plan
    chunks = _verified_chunks(files, manifest, published)
    # Claims and makers are those of unpublished generations, too; sizes are what readers see.
    claims: list[dict[str, Any]] = []
    markers: list[dict[str, Any]] = []
    size_bytes = 0
    for generation in generations:
        claims += _claimed(generation.files, generation.markers)
        markers += generation.markers.values()
    for generation in published:
        size_bytes += sum(n_bytes(generation.manifest.plan).values())
    is_complete = bool(is_committed.all()) and all(
        generation.complete for generation in published
    )
    fields: dict[str, Any] = manifest.to_json()
    # The order of the keys is that of `vitsee info --json`.
    return {
        "path": str(files),
        "complete": is_complete,
        "n_images": plan.n_images,
        "n_slabs": plan.n_slabs,
        "n_committed": len(committed_slabs),
        "missing": _missing_runs(committed_slabs, plan.n_slabs),
        "claimed": claims,
        "n_valid": _n_valid(chunks, committed_slabs, report),
        "slab": plan.slab,
        "codec": plan.codec,
        "size_bytes": size_bytes,
        "model": fields["model"],
        "weights": weights_name(fields["model"]),
        **_plan_record(plan, fields["plan"]),
        "transform": fields["transform"],
        "class_names": fields["class_names"],
        "labels": _labels(chunks, fields["class_names"]),
        "left_out": fields["left_out"],
        "selfcheck": fields["selfcheck"],
        "format": fields["format"],
        "store_id": fields["store_id"],
        "generation": published[-1].number,
        "generations": [_generation_record(generation) for generation in generations],
        "samples_fingerprint": fields["samples_fingerprint"],
        "identity": fields["identity"],
        "info": fields["info"],
        "arrays": _array_records(plan, chunks),
        "made_by": _makers(markers),
    }


def _verified_chunks(
    files: Files, manifest: Manifest, published: Sequence[Generation]
) -> VerifiedChunks:
    """Return the chunks of a store's generations, each checked when it is read.

    Args:
        files: files of the store.
        manifest: manifest of all generations together.
        published: the generations that readers see.
    """
    if len(published) > 1:
        return GrownChunks(published)
    return VerifiedChunks(files, manifest, published[0].markers)


def _plan_record(plan: StorePlan, fields: dict[str, Any]) -> dict[str, Any]:
    """Describe what a store is planned to hold: sites, summaries, pixels, canvas, clips.

    Args:
        plan: plan of the store.
        fields: the same as JSON.
    """
    record = {
        "sites": {site.name: _site_record(site) for site in plan.sites},
        "attention": _attention_record(plan),
        "residual": [name for name, _ in plan.sublayers],
        "grams": [site.name for site in plan.gram_sites],
        "erf": None if plan.erf is None else dataclasses.asdict(plan.erf),
        "inputs": None if plan.inputs is None else list(plan.inputs),
        "canvas": None if plan.canvas is None else fields["canvas"],
    }
    if plan.clip is not None:
        record["clip"] = fields["clip"]
    record["features"] = list(plan.features)
    return record


def _array_records(plan: StorePlan, chunks: VerifiedChunks) -> dict[str, dict[str, Any]]:
    """Return path -> shape, chunks, type and uncompressed size of each array."""
    sizes = n_bytes(plan)
    records = {}
    for path, spec in chunks.specs.items():
        records[path] = {
            "shape": list(spec.shape),
            "chunks": list(spec.chunks),
            "dtype": spec.dtype,
            "size_bytes": sizes[path],
        }
    return records


def _generation_record(generation: Generation) -> dict[str, Any]:
    """Describe the contents and origin of one generation.

    `sites` are those that it stores; `rows` its first and last image, as rows of the combined
    store; `committed` the time of its last commit.
    """
    plan = generation.manifest.plan
    info = generation.manifest.info
    first_row = generation.first_slab * plan.slab
    times = [str(marker.get("committed", "")) for marker in generation.markers.values()]
    return {
        "number": generation.number,
        "complete": generation.complete,
        "sites": [site.name for site in plan.stored],
        "rows": [first_row, first_row + plan.n_images - 1],
        "n_slabs": plan.n_slabs,
        "n_committed": len(generation.markers),
        "size_bytes": sum(n_bytes(plan).values()),
        "committed": max(times, default=""),
        "command": info.get("command"),
        "data_folder": info.get("data_folder"),
        "store_id": generation.manifest.store_id,
    }


def _missing_runs(committed: Iterable[int], n_slabs: int) -> list[list[int]]:
    """Return the runs [first, last] of uncommitted slabs.

    Time depends on the committed slabs alone: a manifest may claim any number of slabs.
    """
    ends = [-1, *sorted(committed), n_slabs]
    return [[a + 1, b - 1] for a, b in itertools.pairwise(ends) if b - a > 1]


def _claimed(files: Files, committed: Container[int]) -> list[dict[str, Any]]:
    """Return a record of each claimant with its uncommitted slabs; claims may be stale."""
    # (host, process id) -> record
    claimants: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        claims = read_claims(files)
    except OSError:  # claims only advise: a store can be described without them
        return []
    for slab, claim in claims.items():
        if slab in committed:
            continue
        host = str(claim.get("host", ""))
        pid = str(claim.get("pid", ""))
        when = str(claim.get("time", ""))
        record = claimants.setdefault(
            (host, pid), {"host": host, "pid": pid, "time": when, "slabs": []}
        )
        record["time"] = max(record["time"], when)
        record["slabs"].append(slab)
    return list(claimants.values())


def _site_record(site: SiteSpec) -> dict[str, Any]:
    """Describe a site; an alias only names the site that it equals."""
    layout = site.layout
    out: dict[str, Any] = {"kind": site.kind, "shape": list(site.shape)}
    if site.site_path is not None:
        out["site_path"] = site.site_path
    if site.alias_of is not None:
        return {**out, "alias_of": site.alias_of}
    if layout is not None:
        out["prefix"] = list(layout.prefix)
        out["grid"] = None if layout.grid is None else list(layout.grid)
        out["stride_px"] = None if layout.stride_px is None else list(layout.stride_px)
        out["offset_px"] = list(layout.offset_px)
        out |= _in_time(layout)
    dtype = "float32" if site.kind == "vector" or site.tokens == "pooled" else site.dtype
    return {
        **out,
        "tokens": site.tokens,
        "dtype": dtype,
        "depth": site.depth,
        "rel_depth": site.rel_depth,
        "groups": list(site.groups),
    }


def _in_time(layout: TokenLayout) -> dict[str, Any]:
    """Return the fields about the axis of time of a layout; {} if it has none."""
    if layout.frames is None:
        return {}
    return {"frames": layout.frames, "stride_frames": layout.stride_frames}


def _attention_record(plan: StorePlan) -> dict[str, Any]:
    """Describe the attention summaries: their level, and the blocks of each group."""
    groups = []
    for group in plan.attention:
        record: dict[str, Any] = {
            "group": group.prefix,
            "blocks": list(group.blocks),
            "n_heads": list(group.n_heads),
            "prefix": list(group.layout.prefix),
            "grid": list(group.layout.grid or ()),
        }
        record.update(_in_time(group.layout))
        if group.window is not None:
            record["window"] = list(group.window)
        groups.append(record)
    return {"level": plan.attention_level, "rollout": plan.rollout, "groups": groups}


def _n_valid(
    chunks: VerifiedChunks, slabs: Sequence[int], report: Callable[[int, int], None]
) -> int | None:
    """Return the number of readable images in these slabs.

    It is None if the counts cannot be read; `vitsee validate` says why.
    """
    done = itertools.count(1)  # `next` is atomic, so that threads need no lock

    def read_count(slab: int) -> int:
        """Return the number of readable images in a slab, and report that it was examined."""
        count = int(chunks.read(chunks.specs["n_valid"], (slab,))[0])
        report(next(done), len(slabs))
        return count

    report(0, len(slabs))
    try:
        return sum(chunks.files.each_small(read_count, slabs))
    except Unreachable:
        raise
    except StoreError:
        return None


def _labels(
    chunks: VerifiedChunks, names: list[str] | None
) -> list[dict[str, Any]] | None:
    """Return each label with its name and number of images, unlabelled images last.

    The label of these is null. The result is None if the labels cannot be read.
    """
    try:
        labels = chunks.read_all(chunks.specs["samples/label"])
    except Unreachable:
        raise
    except StoreError:
        return None
    numbers, images = np.unique(labels, return_counts=True)
    counts = dict(zip(numbers.tolist(), images.tolist(), strict=True))
    records: list[dict[str, Any]] = []
    for label in sorted(counts):
        if label >= 0:
            name = names[label] if names and label < len(names) else None
            records.append({"label": label, "name": name, "n_images": counts[label]})
    for label, n_images in counts.items():
        if label < 0:
            records.append({"label": None, "name": None, "n_images": n_images})
    return records


def _makers(markers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the provenance records of slabs, equal ones merged with their count."""
    differs_by_slab = {"store_id", "slab", "checksums", "committed", "started"}
    counts: Counter[str] = Counter()
    for marker in markers:
        record = {
            key: value for key, value in marker.items() if key not in differs_by_slab
        }
        counts[json.dumps(record, sort_keys=True)] += 1
    return [{"n_slabs": count, **json.loads(text)} for text, count in counts.items()]

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
from vitsee_stores.leases import claims_of
from vitsee_stores.manifest import weights_name
from vitsee_stores.plan import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.sealed import VerifiedChunks
from vitsee_stores.url import Url


def describe(
    path: str | os.PathLike[str] | Url,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Everything about a store except its arrays, JSON-compatible; incomplete stores, too.

    Reads zarr.json, the labels and three small files per slab. `missing`: runs (first, last) of
    uncommitted slabs, counted from 0; `claimed`: which processes claim some of them. `n_valid`
    counts the readable images of the committed slabs; `size_bytes` is the uncompressed size of the
    published generations. `generations` lists the store as it was made and what was added to it,
    including what is being added; of that nothing else is in the record but claims and makers.
    `report` is called with the number of slabs examined and in total, first with 0, from any
    thread. Raises StoreError: missing, not a vitsee store, of another format version, or damaged.
    """
    files = files_at(path)
    every = read_generations(files)
    found = [every[0], *(one for one in every[1:] if one.published)]
    manifest = found[-1].combined
    slabs = committed(found, marked=True)
    plan = manifest.plan
    grown = len(found) > 1
    chunks = (
        GrownChunks(found) if grown else VerifiedChunks(files, manifest, found[0].markers)
    )
    there = np.flatnonzero(slabs).tolist()
    sizes = n_bytes(plan)
    text: dict[str, Any] = manifest.to_json()
    return {
        "path": str(files),
        "complete": bool(slabs.all()) and all(one.complete for one in found),
        "n_images": plan.n_images,
        "n_slabs": plan.n_slabs,
        "n_committed": len(there),
        "missing": _missing(there, plan.n_slabs),
        "claimed": [claim for one in every for claim in _claimed(one.files, one.markers)],
        "n_valid": _n_valid(chunks, there, report),
        "slab": plan.slab,
        "codec": plan.codec,
        "size_bytes": sum(
            size for one in found for size in n_bytes(one.manifest.plan).values()
        ),
        "model": text["model"],
        "weights": weights_name(text["model"]),
        "sites": {site.name: _site(site) for site in plan.sites},
        "attention": _attention(plan),
        "residual": [name for name, _ in plan.sublayers],
        "grams": [site.name for site in plan.gram_sites],
        "erf": None if plan.erf is None else dataclasses.asdict(plan.erf),
        "inputs": None if plan.inputs is None else list(plan.inputs),
        "canvas": None if plan.canvas is None else text["plan"]["canvas"],
        **({} if plan.clip is None else {"clip": text["plan"]["clip"]}),
        "features": list(plan.features),
        "transform": text["transform"],
        "class_names": text["class_names"],
        "labels": _labels(chunks, text["class_names"]),
        "left_out": text["left_out"],
        "selfcheck": text["selfcheck"],
        "format": text["format"],
        "store_id": text["store_id"],
        "generation": found[-1].number,
        "generations": [_generation(one) for one in every],
        "samples_fingerprint": text["samples_fingerprint"],
        "identity": text["identity"],
        "info": text["info"],
        "arrays": {
            path: {
                "shape": list(spec.shape),
                "chunks": list(spec.chunks),
                "dtype": spec.dtype,
                "size_bytes": sizes[path],
            }
            for path, spec in chunks.specs.items()
        },
        "made_by": _makers(marker for one in every for marker in one.markers.values()),
    }


def _generation(one: Generation) -> dict[str, Any]:
    """The contents and origin of one generation. `sites`: its own, without aliases; `rows`: its
    first and last image, as rows of the whole store; `committed`: the time of its last commit."""
    plan = one.manifest.plan
    first = one.first_slab * plan.slab
    return {
        "number": one.number,
        "complete": one.complete,
        "sites": [site.name for site in plan.stored],
        "rows": [first, first + plan.n_images - 1],
        "n_slabs": plan.n_slabs,
        "n_committed": len(one.markers),
        "size_bytes": sum(n_bytes(plan).values()),
        "committed": max(
            (str(m.get("committed", "")) for m in one.markers.values()), default=""
        ),
        "command": one.manifest.info.get("command"),
        "data_folder": one.manifest.info.get("data_folder"),
        "store_id": one.manifest.store_id,
    }


def _missing(committed: Iterable[int], n_slabs: int) -> list[list[int]]:
    """Computed from runs: a manifest may claim very many slabs, and missing ones must be free."""
    ends = [-1, *sorted(committed), n_slabs]
    return [[a + 1, b - 1] for a, b in itertools.pairwise(ends) if b - a > 1]


def _claimed(files: Files, committed: Container[int]) -> list[dict[str, Any]]:
    """Each claimant with its uncommitted slabs; claims may be stale."""
    by: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        claims = claims_of(files)
    except OSError:  # they only advise
        return []
    for slab, claim in claims.items():
        if slab in committed:
            continue
        host, pid, when = (str(claim.get(key, "")) for key in ("host", "pid", "time"))
        one = by.setdefault(
            (host, pid), {"host": host, "pid": pid, "time": when, "slabs": []}
        )
        one["time"] = max(one["time"], when)
        one["slabs"].append(slab)
    return list(by.values())


def _site(site: SiteSpec) -> dict[str, Any]:
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
    """The axis of time of a layout of clips; nothing of other layouts."""
    if layout.frames is None:
        return {}
    return {"frames": layout.frames, "stride_frames": layout.stride_frames}


def _attention(plan: StorePlan) -> dict[str, Any]:
    groups = [
        {
            "group": group.prefix,
            "blocks": list(group.blocks),
            "n_heads": list(group.n_heads),
            "prefix": list(group.layout.prefix),
            "grid": list(group.layout.grid or ()),
            **_in_time(group.layout),
            **({} if group.window is None else {"window": list(group.window)}),
        }
        for group in plan.attention
    ]
    return {"level": plan.attention_level, "rollout": plan.rollout, "groups": groups}


def _n_valid(
    chunks: VerifiedChunks, slabs: Sequence[int], report: Callable[[int, int], None]
) -> int | None:
    """None if the counts cannot be read; `vitsee validate` says why."""
    done = itertools.count(1)

    def read(slab: int) -> int:
        count = int(chunks.read(chunks.specs["n_valid"], (slab,))[0])
        report(next(done), len(slabs))
        return count

    report(0, len(slabs))
    try:
        return sum(chunks.files.each_small(read, slabs))
    except Unreachable:
        raise
    except StoreError:
        return None


def _labels(
    chunks: VerifiedChunks, names: list[str] | None
) -> list[dict[str, Any]] | None:
    """Each label with its name and number of images, unlabelled images (label null) last; None if
    the labels cannot be read."""
    try:
        labels = chunks.read_all(chunks.specs["samples/label"])
    except Unreachable:
        raise
    except StoreError:
        return None
    numbers, images = np.unique(labels, return_counts=True)
    counts = dict(zip(numbers.tolist(), images.tolist(), strict=True))
    known = [label for label in sorted(counts) if label >= 0]
    named = {label: names[label] for label in known if names and label < len(names)}
    listed = [{"label": n, "name": named.get(n), "n_images": counts[n]} for n in known]
    return listed + [
        {"label": None, "name": None, "n_images": n}
        for label, n in counts.items()
        if label < 0
    ]


def _makers(markers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slabs' provenance records, equal ones merged with their count."""
    once = {"store_id", "slab", "checksums", "committed", "started"}
    alike = Counter(
        json.dumps({k: v for k, v in marker.items() if k not in once}, sort_keys=True)
        for marker in markers
    )
    return [{"n_slabs": count, **json.loads(text)} for text, count in alike.items()]

"""Generations of random numbers, added to a store without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Samples, SiteSpec, Store, StorePlan, StoreWriter, open_store
from vitsee_stores.generations import files_of
from vitsee_stores.layout import arrays
from vitsee_stores.manifest import Growth, new_manifest


def add_sites(path: Path, added: Sequence[SiteSpec], seed: int = 0) -> None:
    """A generation with these sites for all images."""
    store = open_store(path)
    plan = StorePlan(
        *(store.plan.n_images, store.plan.slab, store.plan.codec, tuple(added)),
        grams=store.plan.grams,
        canvas=store.plan.canvas,
    )
    _write(store, plan, 0, samples_of(store), seed)


def add_images(path: Path, n: int, seed: int = 0) -> None:
    """A generation with `n` more images."""
    store = open_store(path)
    first = store.n_images // store.plan.slab
    ids = [f"more-{i}" for i in range(n)]
    old = samples_of(store)
    box = None if old.boxes is None else np.full((n, 4), np.nan, np.float32)
    samples = Samples(
        np.concatenate([old.index, store.n_images + np.arange(n)]),
        [*old.ids, *ids],
        np.concatenate([old.labels, np.zeros(n, np.int64)]),
        [*old.splits, *["more"] * n],
        None if box is None or old.boxes is None else np.concatenate([old.boxes, box]),
    )
    plan = dataclasses.replace(
        store.plan, n_images=len(samples) - first * store.plan.slab, weights=(), erf=None
    )
    _write(store, plan, first, samples, seed)


def samples_of(store: Store) -> Samples:
    """The images of a store, as they were given to it."""
    own = store.samples
    return Samples(own.index, own.id.tolist(), own.label, own.split.tolist(), own.box)


def _write(store: Store, plan: StorePlan, first: int, whole: Samples, seed: int) -> None:
    samples = whole.subset(slice(first * plan.slab, None))
    sites = {site.name: site for site in (*store.plan.sites, *plan.sites)}
    manifest = new_manifest(
        {**store.manifest.identity, "sites": [site.name for site in plan.sites]},
        plan,
        samples,
        splits=store.manifest.splits,
        info={"command": "vitsee extract", "data_folder": "/"},
        growth=Growth(
            tuple(one.manifest.store_id for one in store.generations),
            first,
            tuple(sites),
            whole.fingerprint(),
        ),
    )
    files = files_of(store.files, store.generation + 1)
    writer = StoreWriter.create_or_join(files, manifest, samples, durable=False)
    rng = np.random.default_rng(seed)
    for k in range(writer.n_slabs):
        rows = writer.plan.rows(k)
        there = slice(first * plan.slab + rows.start, first * plan.slab + rows.stop)
        writer.write_slab(
            k, _slab(writer.plan, k, store, there, rng), {"command": "grown"}
        )
    assert writer.finish()


def _slab(
    plan: StorePlan, k: int, store: Store, there: slice, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Random numbers; what describes an image that was there is the same again."""
    rows = plan.rows(k)
    n = rows.stop - rows.start
    slab: dict[str, NDArray[Any]] = {}
    for name, spec in arrays(plan).items():
        if spec.has_slab(k):
            shape = (n, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
            slab[name] = rng.integers(1, 99, shape).astype(spec.dtype)
    slab["valid"] = np.ones(n, np.uint8)
    for name in ("valid", "hash", "size"):
        known = store.array(name)[there]
        slab[name][: len(known)] = known
    slab["n_valid"] = np.array(slab["valid"].sum(), np.int64)
    return slab

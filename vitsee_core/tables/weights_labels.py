"""The column `weights` of a table in which several stores' weights have one name.

Weights of a folder or a file are called by its last name, so that `../runA/vit` and `../runB/vit`
are both `vit`. In a table of both they are called by as much of their path as tells them apart.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.types import pl
from vitsee_stores.weights_names import described_weights

if TYPE_CHECKING:
    from vitsee_stores import Store

SIDES = ("", "_a", "_b")
HASH_DIGITS = 8


def distinct_weights(stores: Sequence[Store]) -> dict[str, str]:
    """Return label of a store -> name of its weights, for stores whose usual name is also that of
    other weights: `runA/vit` and `runB/vit`, or `vit (3f2a9c01)` where no path tells them apart.

    stores: all stores of a table.
    """
    stores_by_name: dict[str, list[Store]] = defaultdict(list)
    for store in stores:
        if _weights_path(store):
            stores_by_name[described_weights(store.manifest)].append(store)
    names: dict[str, str] = {}
    for name, namesakes in stores_by_name.items():
        digest_of_label = {store.label: _digest(store) for store in namesakes}
        if len({*digest_of_label.values()}) < 2:
            continue  # the same weights, which have one name
        ends = _distinct_ends(namesakes)
        for store in namesakes:
            path = _weights_path(store)
            if path in ends:
                # Behind the last name more may follow: a key, skips that were left out.
                more = name.removeprefix(_last_name(store))
                names[store.label] = f"{ends[path]}{more}"
            else:
                names[store.label] = f"{name} ({digest_of_label[store.label]})"
    return names


def with_distinct_weights(frame: pl.DataFrame, stores: Sequence[Store]) -> pl.DataFrame:
    """Return a table whose columns `weights`, `weights_a` and `weights_b` tell all stores' weights
    apart; the table itself where they do already."""
    names = distinct_weights(stores)
    for side in SIDES if names else ():
        store_column = f"store{side}"
        column = f"weights{side}"
        if not {store_column, column} <= {*frame.columns}:
            continue
        labels = pl.col(store_column).cast(pl.String)
        renamed = labels.replace_strict(names, default=None, return_dtype=pl.String)
        kept = pl.col(column).cast(pl.String)
        dtype = frame.schema[column]
        frame = frame.with_columns(renamed.fill_null(kept).cast(dtype).alias(column))
    return frame


def _distinct_ends(stores: Sequence[Store]) -> dict[str, str]:
    """Return path of weights -> the last parts of it, as many as tell all paths apart; {} where
    two stores have different weights of one path."""
    digests_by_path: dict[str, set[str]] = defaultdict(set)
    for store in stores:
        digests_by_path[_weights_path(store)].add(_digest(store))
    if any(len(digests) > 1 for digests in digests_by_path.values()):
        return {}
    parts_by_path = {path: Path(path).parts for path in digests_by_path}
    n_parts = 1
    while len({parts[-n_parts:] for parts in parts_by_path.values()}) < len(
        parts_by_path
    ):
        n_parts += 1
    return {path: "/".join(parts[-n_parts:]) for path, parts in parts_by_path.items()}


def _weights_path(store: Store) -> str:
    """Return the path of the folder or file that a store's weights were read from, as its manifest
    says it; "" for weights of another origin."""
    manifest = store.manifest
    weights: Mapping[str, Any] = manifest.model.get("weights") or {}
    source = weights.get("source")
    if source == "checkpoint":
        place = manifest.info.get("checkpoint") or weights.get("file")
    elif source in ("pretrained", "local-dir") and weights.get("folder"):
        name = str(manifest.model.get("name", "")).partition("#")[0].partition("?")[0]
        place = weights.get("pretrained") or name.partition(":")[2]
    else:
        return ""
    made_in = str(manifest.info.get("data_folder") or "")
    path = os.path.normpath(Path(made_in, str(place)).expanduser())
    return path.partition("#")[0]


def _last_name(store: Store) -> str:
    """Return the name of the folder or file, as `described_weights` begins."""
    weights: Mapping[str, Any] = store.manifest.model.get("weights") or {}
    return str(weights.get("folder") or weights.get("file") or "")


def _digest(store: Store) -> str:
    """Return the first digits of the hash of a store's weights."""
    weights: Mapping[str, Any] = store.manifest.model.get("weights") or {}
    return str(weights.get("sha256") or "")[:HASH_DIGITS]

"""Features as files for other tools, written slab by slab: images in the store's order, without
unreadable ones.

Of one site, as a plain file:

    .npy          (images, dim), or (images, tokens, dim) where several tokens are chosen
    .safetensors  the same as the tensor `features`, what they are of in the metadata
    .parquet      one row per image: row, index, id, label, split, features (a list of dim
                  numbers); of one vector per image

Tokens of several sites, as activation shards of saev (protocol 2.1), which its loaders read and
train on:

    FOLDER/saev/shards/HASH/
        metadata.json    what the activations are, in the fields of saev's `Metadata`
        shards.json      the files, and the number of images in each
        acts000000.bin   float32 (images, layers, tokens, dim) in C order, class token first
        vitsee.json      whose images and sites these are; saev does not read it

Where saev's text and its code differ, the code decides: it names the fields; HASH is 8 digits of
the fields in their order; the last file is as long as the others, zeros behind its images, because
readers map every file in the full shape.

Source: https://github.com/OSU-NLP-Group/saev, docs/src/developers/protocol.md, src/saev/data."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import each_slab
from vitsee_core.tables.files import (
    check_output_path,
    new_files,
    remove_leftovers,
    temporary_path,
)
from vitsee_core.tables.formats import ending_of, plain_json
from vitsee_core.tables.results import Table
from vitsee_stores.errors import SiteError, VitseeError, reason
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Slab, Store

log = logging.getLogger(__name__)

ENDINGS = (".npy", ".safetensors", ".parquet")
DTYPES = ("stored", "float16", "float32")
NAME = "features"


def export(
    store: Store,
    site: str,
    path: Path,
    *,
    tokens: str | None = None,
    dtype: str = "stored",
    force: bool = False,
    execution: Execution = DEFAULT,
) -> tuple[int, ...]:
    """Write features to a file of `ENDINGS`, and their description to a companion `path.json`.

    Args:
        store: an open store.
        site: one of its sites, or a selector that matches one.
        path: to write.
        tokens: as for the analyses, by default `cls` if the site has one, else `mean`.
        dtype: "stored" (float16 for tokens, float32 for pooled vectors), "float16" or "float32".
        force: replace existing files.
        execution: which images; memory is that of a slab.

    Returns:
        the shape of the array.

    Raises:
        SiteError: no such site or tokens, several sites, or several tokens for .parquet.
        MissingInput: the store has no such tokens.
        VitseeError: another ending or dtype, numbers beyond float16, or a file that cannot be
            written.
    """
    if dtype not in DTYPES:
        raise VitseeError(f"no dtype {dtype!r}; expected {', '.join(DTYPES)}")
    ending = ending_of(path, ENDINGS, "the export")
    chosen = store.select([site])
    if len(chosen) != 1:
        raise SiteError(
            f"{site} chooses {len(chosen)} sites of {store.label}; expected one"
        )
    features = choose_features(store, chosen[0], tokens)
    if ending == ".parquet" and features.has_tokens:
        raise SiteError(
            f"--tokens {features.selection} is {len(features.tokens)} vectors per image; .parquet "
            "takes one (name a .npy or .safetensors, or choose cls, mean, ROW,COL)"
        )
    rows = execution.rows(store)
    mask = rows.mask & store.valid
    kind = features.arrays[0].dtype if dtype == "stored" else np.dtype(dtype)
    inner = (
        (len(features.tokens), features.dim) if features.has_tokens else (features.dim,)
    )
    shape = (int(mask.sum()), *inner)
    about = {
        "store": store.label,
        "store_id": store.manifest.store_id,
        "model": store.manifest.model.get("name", ""),
        "weights": weights_name(store.manifest.model),
        "site": features.site.name,
        "tokens": [token.name for token in features.tokens],
        "selection": str(features.selection),
        "shape": list(shape),
        "dtype": kind.name,
        "order": "the store's, images that could not be read left out",
        "rows": rows.describe(),
    }
    companion = path.with_name(path.name + ".json")
    with new_files([companion, path], force=force) as (of_about, of_data):
        with open(of_data, "xb") as file, counting(execution.progress, shape[0]):
            sink = _SINKS[ending](file, shape, kind, about, _samples(store, mask))
            for block in features.blocks(
                mask, jobs=execution.jobs, memory=execution.memory
            ):
                sink.add(_cast(block.reshape(len(block), *inner), kind, features))
                execution.progress.advance(len(block))
            sink.close()
        of_about.write_text(json.dumps(plain_json(about), indent=1) + "\n")
    return shape


def _samples(store: Store, mask: NDArray[np.bool_]) -> Mapping[str, NDArray[Any]]:
    samples = store.samples
    columns = {
        name: getattr(samples, name)[mask] for name in ("index", "id", "label", "split")
    }
    return {"row": np.flatnonzero(mask), **columns}


def samples_table(store: Store, execution: Execution = DEFAULT) -> Table:
    """row (of the store), index, id, label, split of the images that `export` writes, in order."""
    return Table(dict(_samples(store, execution.rows(store).mask & store.valid)))


def _cast(
    block: NDArray[Any], kind: np.dtype[Any], features: SiteFeatures
) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast: NDArray[Any] = block.astype(kind)
    if kind.itemsize < block.dtype.itemsize and not np.isfinite(cast).all():
        raise VitseeError(
            f"{features.site.name} holds numbers up to {np.abs(block).max():.3g}, beyond {kind}; "
            "give --dtype float32"
        )
    return cast


class _Sink(ABC):
    """Receives the blocks of an array of known shape in order."""

    def __init__(
        self,
        file: IO[bytes],
        shape: tuple[int, ...],
        kind: np.dtype[Any],
        about: Mapping[str, Any],
        samples: Mapping[str, NDArray[Any]],
    ) -> None:
        self.file = file
        self.shape = shape
        self.kind = kind
        self.samples = samples
        self.about = {
            name: json.dumps(plain_json(value)) for name, value in about.items()
        }
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Write the part before the numbers."""

    @abstractmethod
    def add(self, block: NDArray[Any]) -> None:
        """Append the next images."""

    @abstractmethod
    def close(self) -> None:
        """Write the part after the numbers."""


class _Plain(_Sink):
    def add(self, block: NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(block, self.kind.newbyteorder("<")).data)

    def close(self) -> None:
        self.file.flush()


class _Npy(_Plain):
    def open(self) -> None:
        header = {"descr": self.kind.newbyteorder("<").str, "fortran_order": False}
        np.lib.format.write_array_header_2_0(self.file, header | {"shape": self.shape})


class _Safetensors(_Plain):
    """Length in 8 bytes, a header in JSON, the numbers; the library only writes whole arrays."""

    def open(self) -> None:
        tensor = {
            "dtype": {"float16": "F16", "float32": "F32"}[self.kind.name],
            "shape": list(self.shape),
            "data_offsets": [0, math.prod(self.shape) * self.kind.itemsize],
        }
        header = json.dumps({"__metadata__": self.about, NAME: tensor}).encode()
        header += b" " * (-len(header) % 8)
        self.file.write(len(header).to_bytes(8, "little") + header)


class _Parquet(_Sink):
    def open(self) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise VitseeError(
                "pyarrow is not installed; run: pip install pyarrow, or name a .npy"
            ) from None
        numbers = pa.list_(pa.from_numpy_dtype(self.kind), self.shape[-1])
        fields = [
            pa.field(name, pa.string() if values.dtype.kind == "U" else pa.int64())
            for name, values in self.samples.items()
        ]
        schema = pa.schema([*fields, pa.field(NAME, numbers)], metadata=self.about)
        self.writer = pq.ParquetWriter(self.file, schema)
        self.done = 0

    def add(self, block: NDArray[Any]) -> None:
        import pyarrow as pa

        part = slice(self.done, self.done + len(block))
        schema = self.writer.schema
        flat = pa.array(np.ascontiguousarray(block).ravel())
        columns = [
            pa.array(v[part].tolist(), schema.field(k).type)
            for k, v in self.samples.items()
        ]
        columns.append(pa.FixedSizeListArray.from_arrays(flat, self.shape[-1]))
        self.writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        self.done += len(block)

    def close(self) -> None:
        self.writer.close()


_SINKS: Mapping[str, type[_Sink]] = {
    ".npy": _Npy,
    ".safetensors": _Safetensors,
    ".parquet": _Parquet,
}


# ---------------- activation shards of saev

PROTOCOL = "2.1"
TOKENS_PER_SHARD = 2_400_000  # saev's default
FAMILY = (
    "clip"  # saev admits its own wrappers of models only; its loaders do not look at it
)
TOKENS = ("all", "patches")


def export_saev(
    store: Store,
    sites: Sequence[str],
    folder: Path,
    *,
    tokens: str | None = None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    force: bool = False,
    execution: Execution = DEFAULT,
) -> Path:
    """Write tokens of sites as activation shards.

    Outputs of blocks (`out`) are numbered as the blocks are, other sites in their order. Memory is
    that of a slab of one site per job.

    Args:
        store: an open store.
        sites: its sites, or selectors; all with the same tokens and channels.
        folder: where `saev/shards/HASH` is created, or a folder that ends in `saev/shards`.
        tokens: "all" (the class token, if there is one, and the patches) or "patches". Registers
            have no place in the format and are left out, which is logged.
        tokens_per_shard: the most tokens in a file, over all layers.
        force: replace an existing export of the same name.
        execution: which images.

    Returns:
        the folder with the shards.

    Raises:
        SiteError: no such site, sites of different shapes or without a grid, or other tokens.
        MissingInput: a site is stored pooled only.
        VitseeError: less than an image per file, or a folder that exists or cannot be written.
    """
    if tokens not in (None, *TOKENS):
        raise SiteError(
            f"--tokens {tokens} with --format saev; expected {' or '.join(TOKENS)}"
        )
    chosen = [choose_features(store, site, "all") for site in store.select(list(sites))]
    with_cls = _check_alike(chosen) and tokens != "patches"
    layout = chosen[0].site.layout
    dim = chosen[0].dim
    assert layout is not None
    n_tokens = layout.n_body + with_cls
    if left := [kind for kind in layout.prefix if not (with_cls and kind == "cls")]:
        log.info("%s: saev has no place for %s: left out", store.label, ", ".join(left))
    rows = execution.rows(store)
    mask = rows.mask & store.valid
    n = int(mask.sum())
    per_shard = min(n, tokens_per_shard // (n_tokens * len(chosen)))
    if per_shard < 1:
        raise VitseeError(
            f"an image has {n_tokens * len(chosen)} tokens; {tokens_per_shard} tokens per file are "
            "less than one image"
        )
    outputs = all(own.site.part == "out" for own in chosen)
    data = store.manifest.info.get("data", {}).get("data", "")
    images = Path(data).expanduser() if isinstance(data, str) and data else None
    about = {
        "family": FAMILY,
        "ckpt": store.manifest.model.get("name", "") or store.label,
        "layers": [own.site.depth - 1 if outputs else i for i, own in enumerate(chosen)],
        "content_tokens_per_example": layout.n_body,
        "cls_token": with_cls,
        "d_model": dim,
        "n_examples": n,
        "max_tokens_per_shard": per_shard * n_tokens * len(chosen),
        "data": "",  # a pickle in saev, for its pictures
        "dataset": str(images.resolve())
        if images is not None and images.is_dir()
        else ".",  # saev reads "" as that
        "pixel_agg": "majority",
        "dtype": "float32",
        "protocol": PROTOCOL,
    }
    ours = {
        "store": store.label,
        "store_id": store.manifest.store_id,
        "weights": weights_name(store.manifest.model),
        "sites": [own.site.name for own in chosen],
        "tokens": [*(["cls"] if with_cls else []), *("patches",)],
        "grid": list(layout.grid or ()),
        "rows": rows.describe(),
        "images": store.samples.id[mask].tolist(),
        "labels": store.samples.label[mask].tolist(),
    }
    place = _place(folder, about)
    check_output_path(place)
    if place.exists() and not force:
        raise VitseeError(
            f"{place} exists; give another folder, or --force to replace it"
        )
    shape = (per_shard, len(chosen), n_tokens, dim)
    remove_leftovers(place.parent)
    partial_place = temporary_path(place)
    try:
        partial_place.mkdir(parents=True)
        paths = [partial_place / f"acts{k:06d}.bin" for k in range(-(-n // shape[0]))]
        shards = [np.memmap(path, "<f4", "w+", shape=shape) for path in paths]
        places = np.cumsum(mask) - 1
        work = partial(_write_slab, chosen, with_cls, shards, places)
        jobs = max(1, min(execution.jobs, execution.budget // chosen[0].slab_bytes))
        with counting(execution.progress, n):
            for _ in each_slab(
                store, work, rows=rows, jobs=jobs, progress=execution.progress
            ):
                pass
        for shard in shards:
            shard.flush()
        listed = [
            {"name": f"acts{k:06d}.bin", "n_examples": min(per_shard, n - k * per_shard)}
            for k in range(len(shards))
        ]
        for name, content in (("metadata", about), ("shards", listed), ("vitsee", ours)):
            text = json.dumps(plain_json(content), indent=2)
            (partial_place / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        partial_place.rename(place)
    except OSError as error:
        raise VitseeError(f"cannot write {place}: {reason(error)}") from error
    finally:
        shutil.rmtree(partial_place, ignore_errors=True)
    return place


def _check_alike(chosen: Sequence[SiteFeatures]) -> bool:
    """Whether there is a class token in all sites."""
    first = chosen[0]
    for own in chosen:
        layout = own.site.layout
        if layout is None or layout.grid is None:
            raise SiteError(
                f"{own.site.name} has no grid of patches; expected sites such as blocks"
            )
        names = [[token.name for token in features.tokens] for features in (first, own)]
        if own.dim != first.dim or names[0] != names[1]:
            raise SiteError(
                f"{first.site.name} has {len(first.tokens)} tokens x {first.dim} channels and "
                f"{own.site.name} {len(own.tokens)} x {own.dim}; expected sites of one shape"
            )
    assert first.site.layout is not None
    return first.site.layout.cls is not None


def _place(folder: Path, about: dict[str, Any]) -> Path:
    whole = folder.resolve()
    root = whole if whole.parts[-2:] == ("saev", "shards") else whole / "saev" / "shards"
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False)
    return root / hashlib.sha256(text.encode()).hexdigest()[:8]


def _write_slab(
    chosen: Sequence[SiteFeatures],
    with_cls: bool,
    shards: Sequence[NDArray[np.float32]],
    places: NDArray[np.int64],
    slab: Slab,
) -> None:
    """One site after the other, so that a slab of one site is in memory."""
    at = places[slab.rows][slab.valid]
    shard, row = np.divmod(at, len(shards[0]))
    for layer, features in enumerate(chosen):
        x = features.of_slab(slab, slice(0, len(features.tokens)))
        layout = features.site.layout
        assert layout is not None
        for k in np.unique(shard):
            some = shard == k
            target = shards[k][row[some][0] : row[some][-1] + 1, layer]
            target[:, int(with_cls) :] = x[some, layout.n_prefix :]
            if with_cls:
                target[:, 0] = x[some, layout.cls]

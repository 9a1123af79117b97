"""Features of one site as a plain file, for other tools; written slab by slab.

    .npy          (images, dim), or (images, tokens, dim) where several tokens are chosen
    .safetensors  the same as the tensor `features`, what they are of in the metadata
    .parquet      one row per image: row, index, id, label, split, features (a list of dim
                  numbers); of one vector per image

Images are in the store's order; unreadable ones are left out.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.files import new_files
from vitsee_core.tables.formats import ending_of, plain_json
from vitsee_core.tables.results import Table
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.manifest import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Store

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
        raise SiteError(f"{site} chooses {len(chosen)} sites of {store.label}; expected one")
    features = choose_features(store, chosen[0], tokens)
    if ending == ".parquet" and features.several:
        raise SiteError(
            f"--tokens {features.selection} is {len(features.tokens)} vectors per image; .parquet "
            "takes one (name a .npy or .safetensors, or choose cls, mean, ROW,COL)"
        )
    rows = execution.rows(store)
    mask = rows.mask & store.valid
    kind = features.arrays[0].dtype if dtype == "stored" else np.dtype(dtype)
    inner = (len(features.tokens), features.dim) if features.several else (features.dim,)
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
            for block in features.blocks(mask, jobs=execution.jobs, memory=execution.memory):
                sink.add(_cast(block.reshape(len(block), *inner), kind, features))
                execution.progress.advance(len(block))
            sink.close()
        of_about.write_text(json.dumps(plain_json(about), indent=1) + "\n")
    return shape


def _samples(store: Store, mask: NDArray[np.bool_]) -> Mapping[str, NDArray[Any]]:
    samples = store.samples
    columns = {name: getattr(samples, name)[mask] for name in ("index", "id", "label", "split")}
    return {"row": np.flatnonzero(mask), **columns}


def samples_table(store: Store, execution: Execution = DEFAULT) -> Table:
    """row (of the store), index, id, label, split of the images that `export` writes, in order."""
    return Table(dict(_samples(store, execution.rows(store).mask & store.valid)))


def _cast(block: NDArray[Any], kind: np.dtype[Any], features: SiteFeatures) -> NDArray[Any]:
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
        self.file, self.shape, self.kind, self.samples = file, shape, kind, samples
        self.about = {name: json.dumps(plain_json(value)) for name, value in about.items()}
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
        self.writer, self.done = pq.ParquetWriter(self.file, schema), 0

    def add(self, block: NDArray[Any]) -> None:
        import pyarrow as pa

        part = slice(self.done, self.done + len(block))
        schema = self.writer.schema
        flat = pa.array(np.ascontiguousarray(block).ravel())
        columns = [
            pa.array(v[part].tolist(), schema.field(k).type) for k, v in self.samples.items()
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

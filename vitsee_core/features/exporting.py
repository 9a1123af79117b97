"""Features of one site as a plain file for other tools.

A file is written slab by slab: images in the store's order, without unreadable ones.

    .npy          (images, dim), or (images, tokens, dim) where several tokens are chosen
    .safetensors  the same as the tensor `features`, with its description in the metadata
    .parquet      one row per image: row, index, id, label, split, features (a list of dim
                  numbers); of one vector per image

Activation shards for saev are written by `exporting_saev.py`.
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

from vitsee_core.features import choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.files import new_files
from vitsee_core.tables.formats import ending_of, plain_json
from vitsee_core.tables.results import Table
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Store

ENDINGS = (".npy", ".safetensors", ".parquet")
# "stored" is float16 for tokens, and float32 for pooled vectors.
DTYPES = ("stored", "float16", "float32")
# The name of the array in .safetensors, and of the column in .parquet.
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
        site: one of its sites, or a selector that matches one.
        path: the file to write.
        tokens: as for the analyses, by default `cls` if the site has one, else `mean`.
        dtype: "stored" (float16 for tokens, float32 for pooled vectors), "float16" or "float32".
        force: replace existing files.
        execution: which images; memory is that of a slab.

    Returns:
        the shape of the array.

    Raises:
        SiteError: no such site or tokens, several sites, or several tokens for .parquet.
        MissingInput: the store has no such tokens.
        VitseeError: another ending or dtype, numbers beyond float16, or a refused file.
    """
    if dtype not in DTYPES:
        raise VitseeError(f"no dtype {dtype!r}; expected {', '.join(DTYPES)}")
    ending = ending_of(path, ENDINGS, "the export")
    sites = store.select([site])
    if len(sites) != 1:
        raise SiteError(
            f"{site} chooses {len(sites)} sites of {store.label}; expected one"
        )
    features = choose_features(store, sites[0], tokens)
    if ending == ".parquet" and features.has_tokens:
        raise SiteError(
            f"--tokens {features.selection} is {len(features.tokens)} vectors per image; "
            ".parquet takes one (name a .npy or .safetensors, or choose cls, mean, "
            "ROW,COL)"
        )
    rows = execution.rows(store)
    # The store has NaN for images that could not be read.
    mask = rows.mask & store.valid
    numpy_dtype = features.arrays[0].dtype if dtype == "stored" else np.dtype(dtype)
    image_shape: tuple[int, ...] = (features.dim,)
    if features.has_tokens:
        image_shape = (len(features.tokens), features.dim)
    shape = (int(mask.sum()), *image_shape)
    description = {
        "store": store.label,
        "store_id": store.manifest.store_id,
        "model": store.manifest.model.get("name", ""),
        "weights": weights_name(store.manifest.model),
        "site": features.site.name,
        "tokens": [token.name for token in features.tokens],
        "selection": str(features.selection),
        "shape": list(shape),
        "dtype": numpy_dtype.name,
        "order": "the store's, images that could not be read left out",
        "rows": rows.describe(),
    }
    companion = path.with_name(path.name + ".json")
    # Both files appear together at the end, so that numbers never lie without their description.
    with new_files([companion, path], force=force) as (description_path, data_path):
        with open(data_path, "xb") as file, counting(execution.progress, shape[0]):
            sink = _SINKS[ending](
                file, shape, numpy_dtype, description, _sample_columns(store, mask)
            )
            blocks = features.blocks(mask, jobs=execution.jobs, memory=execution.memory)
            for block in blocks:
                # A block of one token has an axis of length 1, which the file does not.
                block = block.reshape(len(block), *image_shape)
                sink.add(_cast(block, numpy_dtype, features.site.name))
                execution.progress.advance(len(block))
            sink.close()
        description_path.write_text(json.dumps(plain_json(description), indent=1) + "\n")
    return shape


def _sample_columns(store: Store, mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return column -> (images,) what is known of the images in a mask over the store's rows."""
    samples = store.samples
    return {
        "row": np.flatnonzero(mask),
        "index": samples.index[mask],
        "id": samples.id[mask],
        "label": samples.label[mask],
        "split": samples.split[mask],
    }


def samples_table(store: Store, execution: Execution = DEFAULT) -> Table:
    """Return row (of the store), index, id, label and split of the images that `export` writes.

    They are in the order of the file.
    """
    mask = execution.rows(store).mask & store.valid
    return Table(_sample_columns(store, mask))


def _cast(block: NDArray[Any], dtype: np.dtype[Any], site_name: str) -> NDArray[Any]:
    """Return a block in another dtype; raise a VitseeError if a number is beyond it."""
    with np.errstate(
        over="ignore"
    ):  # looked for in the next lines, with a better message
        cast: NDArray[Any] = block.astype(dtype)
    if dtype.itemsize < block.dtype.itemsize and not np.isfinite(cast).all():
        raise VitseeError(
            f"{site_name} holds numbers up to {np.abs(block).max():.3g}, beyond {dtype}; "
            "give --dtype float32"
        )
    return cast


class _Sink(ABC):
    """Writes an array of known shape to a file, block by block in the images' order.

    The libraries of these formats write complete arrays only, which need not fit the memory.
    """

    def __init__(
        self,
        file: IO[bytes],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        description: Mapping[str, Any],
        samples: Mapping[str, NDArray[Any]],
    ) -> None:
        """Write what comes before the numbers.

        Args:
            file: open for writing.
            shape: (images, dim) or (images, tokens, dim).
            dtype: dtype of the numbers.
            description: for the metadata of formats that have some.
            samples: column -> (images,), for tables.
        """
        self.file = file
        self.shape = shape
        self.dtype = dtype
        self.samples = samples
        # Both formats with metadata take texts only.
        self.metadata = {
            name: json.dumps(plain_json(value)) for name, value in description.items()
        }
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Write what comes before the numbers."""

    @abstractmethod
    def add(self, block: NDArray[Any]) -> None:
        """Append the next images."""

    @abstractmethod
    def close(self) -> None:
        """Write what comes after the numbers."""


class _RawSink(_Sink):
    """Numbers in C order and little-endian after a header, and nothing behind them."""

    def add(self, block: NDArray[Any]) -> None:
        """Append the bytes of the next images."""
        self.file.write(np.ascontiguousarray(block, self.dtype.newbyteorder("<")).data)

    def close(self) -> None:
        """Flush the file."""
        self.file.flush()


class _NpySink(_RawSink):
    """A .npy file of format 2.0."""

    def open(self) -> None:
        """Write NumPy's header."""
        header = {
            "descr": self.dtype.newbyteorder("<").str,
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_2_0(self.file, header)


class _SafetensorsSink(_RawSink):
    """A .safetensors file: length of the header in 8 bytes, the header in JSON, the numbers."""

    def open(self) -> None:
        """Write the header, padded so that the numbers are aligned to 8 bytes."""
        tensor = {
            "dtype": {"float16": "F16", "float32": "F32"}[self.dtype.name],
            "shape": list(self.shape),
            "data_offsets": [0, math.prod(self.shape) * self.dtype.itemsize],
        }
        header = json.dumps({"__metadata__": self.metadata, NAME: tensor}).encode()
        header += b" " * (-len(header) % 8)
        self.file.write(len(header).to_bytes(8, "little") + header)


class _ParquetSink(_Sink):
    """A .parquet file: a row group per block, with the samples' columns beside the features."""

    def open(self) -> None:
        """Start the file with its schema; raise a VitseeError if pyarrow is not installed."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise VitseeError(
                "pyarrow is not installed; run: pip install pyarrow, or name a .npy"
            ) from None
        fields = [
            pa.field(name, pa.string() if values.dtype.kind == "U" else pa.int64())
            for name, values in self.samples.items()
        ]
        # Lists of one fixed length: read back as a matrix, without offsets.
        vector_type = pa.list_(pa.from_numpy_dtype(self.dtype), self.shape[-1])
        fields.append(pa.field(NAME, vector_type))
        self.writer = pq.ParquetWriter(
            self.file, pa.schema(fields, metadata=self.metadata)
        )
        self.n_written = 0

    def add(self, block: NDArray[Any]) -> None:
        """Append the next images as a row group."""
        import pyarrow as pa

        rows = slice(self.n_written, self.n_written + len(block))
        schema = self.writer.schema
        columns = [
            pa.array(values[rows].tolist(), schema.field(name).type)
            for name, values in self.samples.items()
        ]
        numbers = pa.array(np.ascontiguousarray(block).ravel())
        columns.append(pa.FixedSizeListArray.from_arrays(numbers, self.shape[-1]))
        self.writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        self.n_written += len(block)

    def close(self) -> None:
        """Write the file's footer."""
        self.writer.close()


_SINKS: Mapping[str, type[_Sink]] = {
    ".npy": _NpySink,
    ".safetensors": _SafetensorsSink,
    ".parquet": _ParquetSink,
}

"""Chunks as bytes: encoding, checksums, and boxes of an array read from the chunks they touch.

The bytes are those that zarr writes for the same metadata (a test compares them). Zarr's own
path was a half to a third as fast on this layout; see benchmarks/store_io.py.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from vitsee_stores.disk import each, reason, work_pool
from vitsee_stores.errors import StoreError
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec

Box = tuple[slice, ...]
ZSTD_LEVEL, LZ4_LEVEL = 1, 5
_thread = threading.local()


def file_name(index: Sequence[int]) -> str:
    """Name of a chunk's file within its array's folder: `c.3.0.1`."""
    return ".".join(["c", *map(str, index)])


def codecs(spec: ArraySpec) -> list[dict[str, Any]]:
    """The array's codecs as its zarr.json names them."""
    item = np.dtype(spec.dtype).itemsize
    chain: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if item > 1 else {"name": "bytes"}
    ]
    if spec.codec == "zstd":
        chain.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    elif spec.codec == "lz4":
        blosc = {"typesize": item, "cname": "lz4", "clevel": LZ4_LEVEL, "shuffle": "shuffle"}
        chain.append({"name": "blosc", "configuration": {**blosc, "blocksize": 0}})
    return [*chain, {"name": "crc32c"}]


def encode(block: NDArray[Any], spec: ArraySpec) -> list[bytes | NDArray[np.uint8]]:
    """The bytes of one whole chunk, in pieces to be written one after the other."""
    data: Any = block.reshape(-1).view(np.uint8)
    if (compressor := _compressor(spec.codec, block.dtype.itemsize)) is not None:
        data = np.frombuffer(compressor.encode(data), np.uint8)
    return [data, int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "little")]


def decode(data: bytes | memoryview[int], spec: ArraySpec) -> NDArray[Any]:
    """The chunk that `encode` turned into `data`.

    Raises:
        ValueError: the checksum or the length is wrong; says which.
    """
    if len(data) <= CHECKSUM_BYTES:
        raise ValueError(f"is cut short: it has {len(data)} bytes")
    body = np.frombuffer(data, np.uint8, len(data) - CHECKSUM_BYTES)
    compressor = _compressor(spec.codec, np.dtype(spec.dtype).itemsize)
    if compressor is None and len(body) != spec.chunk_bytes:
        whole = spec.chunk_bytes + CHECKSUM_BYTES
        raise ValueError(f"has {len(data)} bytes, expected {whole}")
    if int(google_crc32c.value(body)) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise ValueError("does not match its checksum")
    if compressor is not None:
        body = np.frombuffer(compressor.decode(body), np.uint8)
        if len(body) != spec.chunk_bytes:
            raise ValueError(f"unpacks to {len(body)} bytes, expected {spec.chunk_bytes}")
    return body.view(spec.dtype).reshape(spec.chunks)


@lru_cache
def _compressor(codec: str, item: int) -> Any:
    if codec == "zstd":
        from numcodecs.zstd import Zstd

        return Zstd(level=ZSTD_LEVEL)
    if codec == "lz4":
        from numcodecs.blosc import SHUFFLE, Blosc

        return Blosc(cname="lz4", clevel=LZ4_LEVEL, shuffle=SHUFFLE, typesize=item)
    return None


def padded(values: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """A contiguous chunk with `values` in its first corner and the fill value beyond.

    It lies in a buffer of this thread, which the next call takes again: fresh memory of this size
    costs more page faults than the copy itself.
    """
    scratch: NDArray[np.uint8] | None = getattr(_thread, "scratch", None)
    if scratch is None or len(scratch) < spec.chunk_bytes:
        scratch = _thread.scratch = np.empty(spec.chunk_bytes, np.uint8)
    block = scratch[: spec.chunk_bytes].view(spec.dtype).reshape(spec.chunks)
    if values.shape != spec.chunks:
        block.fill(spec.fill)
    block[tuple(slice(n) for n in values.shape)] = values
    return block


def boxes(spec: ArraySpec, first: int | None = None) -> list[tuple[tuple[int, ...], Box]]:
    """Every chunk's index and the part of the array it holds; only those whose place along the
    first axis is `first`, where given."""
    ranges: list[Sequence[int]] = [range(n) for n in spec.grid]
    if first is not None:
        ranges[0] = [first]
    return [
        (
            index,
            tuple(
                slice(i * c, min((i + 1) * c, n))
                for i, c, n in zip(index, spec.chunks, spec.shape, strict=True)
            ),
        )
        for index in itertools.product(*ranges)
    ]


def read_chunk(folder: str, spec: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
    """One whole chunk, padding included; where chunks are not compressed it lies in memory that
    this thread's next read takes again.

    Raises:
        StoreError: missing, unreadable or damaged; names the array and, where there is one, the
            slab.
    """
    path = os.path.join(folder, spec.path, file_name(index))
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            scratch = getattr(_thread, "chunk", None)
            if scratch is None or len(scratch) < size:
                scratch = _thread.chunk = bytearray(size)
            data = memoryview(scratch)[:size]
            done = 0
            while done < size and (got := file.readinto(data[done:])):
                done += got
        return decode(data, spec)
    except FileNotFoundError:
        what = "is missing"
    except OSError as error:
        what = f"cannot be read: {reason(error)}"
    except (ValueError, RuntimeError) as error:
        what = str(error) if isinstance(error, ValueError) else f"cannot be unpacked: {error}"
    raise StoreError(
        f"{folder} is damaged: {where(spec, index)}: {file_name(index)} {what} "
        f"(run: vitsee validate {folder} --deep)"
    )


def where(spec: ArraySpec, index: Sequence[int]) -> str:
    """A chunk's array and slab in words."""
    return spec.path if spec.per == "once" else f"{spec.path}, slab {index[0]}"


def read_box(
    folder: str,
    spec: ArraySpec,
    box: Box,
    out: NDArray[Any] | None = None,
    skip: Callable[[int], bool] = lambda slab: False,
) -> NDArray[Any]:
    """The part of an array that `box` (start, stop on every axis) cuts out, from the chunks it
    touches alone and in parallel; into `out` where given.

    Chunks whose place along the first axis is to be skipped are not opened: fill values stand
    there.

    Raises:
        StoreError: a chunk is missing or damaged.
    """
    shape = tuple(part.stop - part.start for part in box)
    result = np.empty(shape, spec.dtype) if out is None else out
    if 0 in shape:
        return result

    def read(index: tuple[int, ...]) -> None:
        inside, target = [], []
        for i, part, size in zip(index, box, spec.chunks, strict=True):
            start, stop = max(part.start, i * size), min(part.stop, (i + 1) * size)
            inside.append(slice(start - i * size, stop - i * size))
            target.append(slice(start - part.start, stop - part.start))
        skipped = spec.per != "once" and skip(index[0])
        result[tuple(target)] = (
            spec.fill if skipped else read_chunk(folder, spec, index)[tuple(inside)]
        )

    touched = [
        range(part.start // size, math.ceil(part.stop / size))
        for part, size in zip(box, spec.chunks, strict=True)
    ]
    each(work_pool, read, list(itertools.product(*touched)))
    return result


def read_all(folder: str, spec: ArraySpec) -> NDArray[Any]:
    """The whole array.

    Raises:
        StoreError: a chunk is missing or damaged.
    """
    return read_box(folder, spec, tuple(slice(0, n) for n in spec.shape))

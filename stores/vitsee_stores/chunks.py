"""Chunks as bytes and as files: names, encoding, checksums.

The bytes equal those that zarr writes for the same metadata (tested). Why zarr does not move them:
of seven measured ways (zarr's default and fused pipelines, zarrs and TensorStore among them) this
one took the fewest CPU seconds per byte, time that extraction and analyses need themselves; a
commit must know which bytes were written, and that they are on disk (fsync), before it writes the
marker; and no event loop is started in processes that fork workers. benchmarks/store_io.py compares
it with the installed zarr.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import StoreError, Unreachable, reason
from vitsee_stores.files import Files, NoAnswer
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec

Box = tuple[slice, ...]
ZSTD_LEVEL = 1
LZ4_LEVEL = 5
_thread = threading.local()


def file_name(index: Sequence[int]) -> str:
    """A chunk's file name within its array's folder: `c.3.0.1`."""
    return ".".join(["c", *map(str, index)])


def chunk_name(spec: ArraySpec, index: Sequence[int]) -> str:
    """A chunk's file as a path below the store."""
    return f"{spec.path}/{file_name(index)}"


def encode(block: NDArray[Any], spec: ArraySpec) -> list[bytes | NDArray[np.uint8]]:
    """The bytes of one whole chunk, as pieces to be written in order."""
    data: Any = block.reshape(-1).view(np.uint8)
    if (compressor := _compressor(spec.codec, block.dtype.itemsize)) is not None:
        data = np.frombuffer(compressor.encode(data), np.uint8)
    return [data, int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "little")]


def decode(data: bytes | memoryview[int], spec: ArraySpec) -> NDArray[Any]:
    """The chunk that `encode` turned into `data`. Raises ValueError: wrong checksum or length; says
    which."""
    check_length(len(data), spec)
    body = np.frombuffer(data, np.uint8, len(data) - CHECKSUM_BYTES)
    if int(google_crc32c.value(body)) != checksum(data):
        raise ValueError("does not match its checksum")
    compressor = _compressor(spec.codec, np.dtype(spec.dtype).itemsize)
    if compressor is not None:
        # A few bytes can claim to unpack to any size: check before allocating memory.
        claimed = _SIZE_OF[spec.codec](body)
        if claimed != spec.chunk_bytes:
            raise ValueError(f"unpacks to {claimed} bytes, expected {spec.chunk_bytes}")
        unpacked = np.empty(spec.chunk_bytes, np.uint8)
        compressor.decode(body, unpacked)
        body = unpacked
    return body.view(spec.dtype).reshape(spec.chunks)


def checksum(data: bytes | memoryview[int]) -> int:
    """The crc32c at the end of a chunk's bytes."""
    return int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def check_length(size: int, spec: ArraySpec) -> None:
    """Refuse a size that no file of such a chunk can have. Raises ValueError: too short or too
    long."""
    whole = spec.chunk_bytes + CHECKSUM_BYTES
    if size <= CHECKSUM_BYTES:
        raise ValueError(f"is cut short: it has {size} bytes")
    if spec.codec == "none" and size != whole:
        raise ValueError(f"has {size} bytes, expected {whole}")
    # Incompressible data grow by less than a 64th and a header.
    if size > (longest := whole + spec.chunk_bytes // 64 + 4096):
        raise ValueError(f"has {size} bytes, expected at most {longest}")


def _zstd_size(body: NDArray[np.uint8]) -> int:
    """Unpacked size stated by a zstd frame header (RFC 8878, 3.1.1.1); -1 if it states none."""
    head = body[:18].tobytes()
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    flags = head[4]
    single = flags >> 5 & 1
    length = (1 if single else 0, 2, 4, 8)[flags >> 6]
    begin = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]
    field = head[begin : begin + length]
    if not length or len(field) < length:
        return -1
    return int.from_bytes(field, "little") + (256 if length == 2 else 0)


def _blosc_size(body: NDArray[np.uint8]) -> int:
    """Unpacked size stated by a Blosc header; -1 if its packed length is not the body's."""
    if len(body) < 16 or int.from_bytes(body[12:16].tobytes(), "little") != len(body):
        return -1
    return int.from_bytes(body[4:8].tobytes(), "little")


_SIZE_OF = {"zstd": _zstd_size, "lz4": _blosc_size}


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
    """A contiguous chunk with `values` in its first corner and the fill value elsewhere; `values`
    itself if it is one already.

    A copy is made in a per-thread buffer that the next call reuses: page faults of fresh memory
    cost more than the copy.
    """
    if values.shape == spec.chunks and values.flags.c_contiguous:
        return values
    scratch: NDArray[np.uint8] | None = getattr(_thread, "scratch", None)
    if scratch is None or len(scratch) < spec.chunk_bytes:
        scratch = _thread.scratch = np.empty(spec.chunk_bytes, np.uint8)
    block = scratch[: spec.chunk_bytes].view(spec.dtype).reshape(spec.chunks)
    if values.shape != spec.chunks:
        block.fill(spec.fill)
    block[tuple(slice(n) for n in values.shape)] = values
    return block


def boxes(spec: ArraySpec, first: int | None = None) -> list[tuple[tuple[int, ...], Box]]:
    """Each chunk's index and the part of the array it holds; if `first` is given, only chunks at
    that place along the first axis."""
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


def read_chunk(
    files: Files, spec: ArraySpec, index: Sequence[int]
) -> tuple[NDArray[Any], int]:
    """One whole chunk, padding included, and its checksum. An uncompressed chunk is in memory that
    this thread's next read may reuse. Raises StoreError: missing, unreadable or damaged; names the
    array and, if there is one, the slab."""
    name = chunk_name(spec, index)
    try:
        data = files.read_chunk(name, lambda size: check_length(size, spec))
        return decode(data, spec), checksum(data)
    except (OSError, ValueError) as error:
        what = defect(files, name, error)
    except RuntimeError as error:
        what = f"cannot be unpacked: {error}"
    raise damage(files, spec, index, what)


def defect(files: Files, name: str, error: OSError | ValueError) -> str:
    """Describes the damage of a file that could not be read. Raises Unreachable: it could not be
    requested, which is not damage."""
    if isinstance(error, NoAnswer):
        raise no_answer(files, name, error) from None
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read: {reason(error)}"
    return str(error)


def no_answer(files: Files, name: str, error: OSError) -> Unreachable:
    """The error for a file that could not be requested; this is not damage."""
    return Unreachable(f"{files} cannot be read: {name}: {reason(error)}")


def damage(files: Files, spec: ArraySpec, index: Sequence[int], what: str) -> StoreError:
    """The error for a damaged chunk."""
    return StoreError(
        f"{files} is damaged: {where(spec, index)}: {file_name(index)} {what} "
        f"(run: vitsee validate {files} --deep)"
    )


def where(spec: ArraySpec, index: Sequence[int]) -> str:
    if spec.per == "once":
        return spec.path
    return f"{spec.path}, slab {index[0]}"

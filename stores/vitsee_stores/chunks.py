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
    """Return a chunk's file name within its array's folder: `c.3.0.1`."""
    return ".".join(["c", *map(str, index)])


def chunk_name(spec: ArraySpec, index: Sequence[int]) -> str:
    """Return a chunk's file as a path below the store."""
    return f"{spec.path}/{file_name(index)}"


def encode(block: NDArray[Any], spec: ArraySpec) -> list[bytes | NDArray[np.uint8]]:
    """Return the bytes of one chunk, as pieces to be written in order.

    The pieces are the values, compressed by the array's codec, and their crc32c.
    """
    data: Any = block.reshape(-1).view(np.uint8)
    compressor = _compressor(spec.codec, block.dtype.itemsize)
    if compressor is not None:
        data = np.frombuffer(compressor.encode(data), np.uint8)
    return [data, int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "little")]


def decode(data: bytes | memoryview[int], spec: ArraySpec) -> NDArray[Any]:
    """Return the chunk that `encode` turned into `data`.

    Raises:
        ValueError: wrong checksum or length; says which.
    """
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
    """Return the crc32c at the end of a chunk's bytes."""
    return int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def check_length(size: int, spec: ArraySpec) -> None:
    """Refuse a size that no file of such a chunk can have.

    Raises:
        ValueError: too short or too long.
    """
    plain_size = spec.chunk_bytes + CHECKSUM_BYTES
    if size <= CHECKSUM_BYTES:
        raise ValueError(f"is cut short: it has {size} bytes")
    if spec.codec == "none" and size != plain_size:
        raise ValueError(f"has {size} bytes, expected {plain_size}")
    # Incompressible data grow by less than a 64th and a header.
    max_size = plain_size + spec.chunk_bytes // 64 + 4096
    if size > max_size:
        raise ValueError(f"has {size} bytes, expected at most {max_size}")


def _zstd_size(body: NDArray[np.uint8]) -> int:
    """Return the unpacked size that a zstd frame header states; -1 if it states none.

    The header is that of RFC 8878, section 3.1.1.1: magic number, descriptor, window
    descriptor, dictionary id, frame content size.
    """
    head = body[:18].tobytes()  # the longest header
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    descriptor = head[4]
    is_single_segment = bool(descriptor >> 5 & 1)
    # Frame_Content_Size_Flag and Dictionary_ID_Flag are codes of field lengths.
    length = (0, 2, 4, 8)[descriptor >> 6]
    begin = 5 + (0, 1, 2, 4)[descriptor & 3]
    if is_single_segment:
        length = max(1, length)
    else:
        begin += 1  # the window descriptor, which only several segments have
    field = head[begin : begin + length]
    if not length or len(field) < length:
        return -1
    size = int.from_bytes(field, "little")
    if length == 2:  # which counts from 256
        size += 256
    return size


def _blosc_size(body: NDArray[np.uint8]) -> int:
    """Return the unpacked size that a Blosc header states; -1 if it is of another length."""
    if len(body) < 16 or int.from_bytes(body[12:16].tobytes(), "little") != len(body):
        return -1
    return int.from_bytes(body[4:8].tobytes(), "little")


_SIZE_OF = {"zstd": _zstd_size, "lz4": _blosc_size}


@lru_cache
def _compressor(codec: str, item: int) -> Any:
    """Return the numcodecs compressor of a codec for items of this size; None for "none"."""
    if codec == "zstd":
        from numcodecs.zstd import Zstd

        return Zstd(level=ZSTD_LEVEL)
    if codec == "lz4":
        from numcodecs.blosc import SHUFFLE, Blosc

        return Blosc(cname="lz4", clevel=LZ4_LEVEL, shuffle=SHUFFLE, typesize=item)
    return None


def padded(values: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """Return a whole chunk with `values` in its first corner and the fill value elsewhere.

    `values` itself is returned if it is a contiguous whole chunk.

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
    """Return each chunk's index and its box of the array.

    Args:
        first: index along the first axis of the returned chunks; None for all.
    """
    ranges: list[Sequence[int]] = [range(n) for n in spec.grid]
    if first is not None:
        ranges[0] = [first]
    result = []
    for index in itertools.product(*ranges):
        box = []
        for i, length, n in zip(index, spec.chunks, spec.shape, strict=True):
            # The last chunk of an axis is padded: its box ends with the array.
            box.append(slice(i * length, min((i + 1) * length, n)))
        result.append((index, tuple(box)))
    return result


def read_chunk(
    files: Files, spec: ArraySpec, index: Sequence[int]
) -> tuple[NDArray[Any], int]:
    """Read one chunk, padding included, and its checksum.

    An uncompressed chunk is in memory that this thread's next read may reuse.

    Raises:
        StoreError: the chunk is missing, unreadable or damaged; names the array and, if there
            is one, the slab.
    """
    name = chunk_name(spec, index)
    try:
        data = files.read_chunk(name, lambda size: check_length(size, spec))
        return decode(data, spec), checksum(data)
    except (OSError, ValueError) as error:
        problem = defect(files, name, error)
    except RuntimeError as error:  # of the decompressor
        problem = f"cannot be unpacked: {error}"
    raise damage(files, spec, index, problem)


def defect(files: Files, name: str, error: OSError | ValueError) -> str:
    """Describe the damage of a file that could not be read.

    Raises:
        Unreachable: the file could not be requested, which is not damage.
    """
    if isinstance(error, NoAnswer):
        raise no_answer(files, name, error) from None
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read: {reason(error)}"
    return str(error)


def no_answer(files: Files, name: str, error: OSError) -> Unreachable:
    """Return the error for a file that could not be requested, which is not damage."""
    return Unreachable(f"{files} cannot be read: {name}: {reason(error)}")


def damage(
    files: Files, spec: ArraySpec, index: Sequence[int], problem: str
) -> StoreError:
    """Return the error for a damaged chunk; `problem` is the end of the sentence."""
    return StoreError(
        f"{files} is damaged: {where(spec, index)}: {file_name(index)} {problem} "
        f"(run: vitsee validate {files} --deep)"
    )


def where(spec: ArraySpec, index: Sequence[int]) -> str:
    """Return the words for an array, and its slab if it has slabs."""
    if spec.per == "once":
        return spec.path
    return f"{spec.path}, slab {index[0]}"

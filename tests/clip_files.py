"""Small video files whose frames say which they are."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

STEP = 10  # levels of grey between neighbouring frames, far more than a codec changes
MILLISECOND = Fraction(1, 1000)


def grey(k: int, size: tuple[int, int] = (48, 64)) -> NDArray[np.uint8]:
    """Frame k: an even grey."""
    return np.full((*size, 3), 10 + STEP * k, np.uint8)


def which(image: Any) -> int:
    """Which frame this is."""
    return round((float(np.asarray(image).mean()) - 10) / STEP)


def write_video(
    path: Path,
    n: int = 24,
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    rate: int = 10,
    gop: int = 8,
    at_ms: Sequence[int] | None = None,
    frames: Sequence[NDArray[np.uint8]] | None = None,
    **options: str,
) -> Path:
    """A video of `n` frames, or of these, at an even rate or at these times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [grey(k) for k in range(n)] if frames is None else frames
    with av.open(str(path), "w") as c:
        stream: Any = c.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pixel_format
        stream.codec_context.gop_size = gop
        if at_ms is not None:
            stream.time_base = stream.codec_context.time_base = MILLISECOND
        for k, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if at_ms is not None:
                frame.pts, frame.time_base = at_ms[k], MILLISECOND
            c.mux(stream.encode(frame))
        c.mux(stream.encode(None))
    return path


def turn(path: Path, matrix: Sequence[int]) -> Path:
    """Give the one track of an MP4 file a display matrix: a, b, c, d of x' = a x + c y, y' = b x +
    d y (and the translation that brings it back to the first quadrant)."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44  # 4 of the name, 40 of a header of version 0
    a, b, c, d = (n << 16 for n in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def write_frames(
    folder: Path, pictures: Sequence[NDArray[np.uint8]], digits: int = 5
) -> Path:
    """A folder of PNG files, as DAVIS has its videos: 00000.png, 00001.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{k:0{digits}d}.png")
    return folder


def write_sound(path: Path) -> Path:
    """A file with a second of silence and no picture."""
    with av.open(str(path), "w") as c:
        stream = c.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), "fltp", "mono"
        )
        frame.sample_rate = 16000
        c.mux(stream.encode(frame))
        c.mux(stream.encode(None))
    return path

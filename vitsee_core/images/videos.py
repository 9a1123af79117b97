"""Which frames of a clip a model sees, and the frames of video files, by PyAV.

The frames are those that a viewer would see at certain times: for `frames` T of them the middles of
T equal parts of the clip, or with `every` K times that are K mean frame intervals apart, around the
clip's middle. Of a constant rate that is frame floor((k + 1/2) n / T) of n, and with K frame
floor(n / 2 + (k + (1 - T) / 2) K). Times are compared as whole ticks of the file's clock.

A file is read twice: its packets without decoding, which gives the time of every frame, then from
the last keyframe before each frame that is wanted. Only the formats below are tried, so that a file
cannot send the reader to other files or to a server. Loading workers run this module."""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images.decoding import one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_stores.errors import reason
from vitsee_stores.plan import TIMES

ORDERED, SHUFFLED, STILL = TIMES


@dataclass(frozen=True)
class Timeline:
    """When each frame of a clip is shown.

    Attributes:
        starts: (frames,) when each frame begins to be shown, in ticks, ascending.
        end: when the last frame ends to be shown, in ticks.
        tick_seconds: the length of a tick; None if the clip does not say.
    """

    starts: Sequence[int]
    end: int
    tick_seconds: float | None = None

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Sampling:
    """The frames that a model sees of a clip, see `Clip` in vitsee_stores.

    Attributes:
        frames: the number of frames.
        every: the distance between frames, in mean frame intervals; None spreads the frames over
            the whole clip.
        time: the order in which the model sees them, one of `TIMES`.
        seed: the seed of the orders of shuffled frames.
    """

    frames: int
    every: int | None = None
    time: str = ORDERED
    seed: int = 0

    def chosen(self, name: str, line: Timeline) -> list[int]:
        """Return the sampled frames' numbers in the timeline, in the order of time.

        Args:
            name: the clip's name, for messages.
            line: when the clip's frames are shown.

        Raises:
            ImageError: the clip has no frames, or fewer than are needed.
        """
        n = len(line)
        n_sampled = self.frames
        if not n:
            raise ImageError(name, "it has no frames")
        reach = n_sampled
        distance = ""
        if self.every is not None:
            reach = (n_sampled - 1) * self.every + 1
            distance = f" every {self.every} reach over {reach} and"
        if reach > n:
            has = f"{n} frame{'' if n == 1 else 's'}"
            raise ImageError(
                name, f"it has {has}; {n_sampled} frames{distance} were asked for"
            )
        begin = line.starts[0]
        length = line.end - begin
        # In whole numbers, so that no rounding moves a time across the border of two frames.
        ticks = []
        for k in range(n_sampled):
            if self.every is None:
                # The middle of part k of T equal ones: (k + 1/2) length / T.
                offset = (2 * k + 1) * length // (2 * n_sampled)
            else:
                # length / 2 + (k + (1 - T) / 2) K length / n, around the clip's middle.
                steps = (2 * k + 1 - n_sampled) * self.every
                offset = (length * n + steps * length) // (2 * n)
            ticks.append(begin + offset)
        starts = np.array(line.starts, np.int64)
        # The frame that is shown at a tick is the last one that starts at or before it.
        numbers = np.searchsorted(starts, ticks, side="right") - 1
        return [int(number) for number in numbers]

    def order(self, sample: str) -> list[int]:
        """Return, for each frame that the model sees, its position among the sampled frames.

        Ordered frames have 0, 1, 2, ...; still ones the middle frame throughout; shuffled ones a
        permutation that depends on the sample's id and the seed alone, and that is never the order
        of time (if there are at least two frames).
        """
        if self.time == STILL:
            return [self.frames // 2] * self.frames
        if self.time == ORDERED or self.frames == 1:
            return list(range(self.frames))
        key = hashlib.blake2b(f"{self.seed}:{sample}".encode(), digest_size=16).digest()
        draws = np.random.PCG64(int.from_bytes(key, "little"))
        while True:
            # numpy promises the raw draws across its versions, not what it makes of them.
            order: NDArray[np.int64] = np.argsort(
                draws.random_raw(self.frames), kind="stable"
            )
            if (order != np.arange(self.frames)).any():
                return [int(position) for position in order]

    def seconds(self, line: Timeline) -> float:
        """Return the seconds between neighbouring sampled frames.

        NaN is returned for a single frame, and if the clip does not say how long a tick is.
        """
        if line.tick_seconds is None or self.frames == 1:
            return float("nan")
        length = (line.end - line.starts[0]) * line.tick_seconds
        if self.every is None:
            return length / self.frames
        return length * self.every / len(line)


# ---------------- video files

FORMATS = "mov,matroska,webm,avi,gif"
MISSING = (
    "videos are read by PyAV, which is not installed; run: pip install 'vitsee[video]'"
)
# A container that lasts this fraction less than it says is cut short.
_CUT_SHARE = Fraction(1, 20)
_GIF_END = b";"
_GIF_TAIL = 64
_GIF_PADDING = b"\0\r\n"
# Of the signs of a, b, c, d in a display matrix: a pixel (x, y) goes to (a x + c y, b x + d y).
_TURNS = {
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}


class _OtherTimes(Exception):
    """The decoded frames have other times than the packets said."""


@dataclass
class Video:
    """One video file.

    Attributes:
        name: in errors.
        file: of its bytes; closed with the video.
        line: when its frames are shown.
    """

    name: str
    file: IO[bytes]
    line: Timeline = field(init=False)

    def __post_init__(self) -> None:
        """Raises:
        ImageError: not a video, cut short, or too large.
        DataError: PyAV is not installed.
        """
        if not self.file.seek(0, os.SEEK_END):
            raise ImageError(self.name, "the file is empty")
        self._scaler: Any = None
        self._keys: list[int] = []
        self._counted = False
        self.line = self._read_line()

    def close(self) -> None:
        self.file.close()

    def frames(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """The frames at these places of the timeline, which ascend; upright, 8-bit RGB. Raises
        ImageError: a frame cannot be decoded."""
        given = 0  # of those that were found where the packets said
        if not self._counted:
            try:
                for image in self._from_keys(places):
                    yield image
                    given += 1
                return
            except _OtherTimes:
                yield from self._by_time(places[given:])
                return
        yield from self._by_number(places)

    def _read_line(self) -> Timeline:
        with self._opened() as (container, stream):
            starts: list[tuple[int, int]] = []
            n_packets = 0
            last = Fraction(0)
            whole = container.format.name.startswith("matroska")
            for packet in container.demux() if whole else container.demux(stream):
                if not packet.size:
                    continue
                if packet.pts is not None and packet.time_base is not None:
                    last = max(
                        last, (packet.pts + (packet.duration or 0)) * packet.time_base
                    )
                if packet.stream is not stream:
                    continue
                n_packets += 1
                if packet.is_discard:
                    continue
                self._counted |= packet.pts is None
                starts.append((packet.pts or 0, packet.duration or 0))
                if packet.is_keyframe and packet.pts is not None:
                    self._keys.append(packet.pts)
            self._check_whole(container, stream, n_packets, last if whole else None)
            # Of AVI the times are those of packets, in the order of decoding.
            self._counted |= container.format.name == "avi"
            rate = stream.average_rate
            if self._counted or not starts:
                return Timeline(
                    range(n_packets), n_packets, float(1 / rate) if rate else None
                )
            starts.sort()
            self._keys.sort()
            times = [pts for pts, _ in starts]
            step = starts[-1][1]
            if not step:
                step = max(1, (times[-1] - times[0]) // max(1, len(times) - 1))
            tick = stream.time_base
            return Timeline(times, times[-1] + step, float(tick) if tick else None)

    def _check_whole(
        self, container: Any, stream: Any, n_packets: int, last: Fraction | None
    ) -> None:
        """Raises ImageError: the file holds fewer frames, or less time, than it says."""
        if n_packets < stream.frames:
            raise ImageError(
                self.name,
                f"it is cut short: {n_packets} of {stream.frames} frames are there",
            )
        if last is not None and container.duration:
            stated = Fraction(container.duration, 1_000_000)
            if last < stated * (1 - _CUT_SHARE):
                text = f"it is cut short: {float(last):.3g} of {float(stated):.3g} s are there"
                raise ImageError(self.name, text)
        if container.format.name == "gif":
            self.file.seek(0, os.SEEK_END)
            self.file.seek(-min(_GIF_TAIL, self.file.tell()), os.SEEK_CUR)
            if not self.file.read().rstrip(_GIF_PADDING).endswith(_GIF_END):
                raise ImageError(self.name, "it is cut short: a GIF without its end")

    def _from_keys(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """The frames, each from the keyframe before it unless that was decoded already. Raises
        _OtherTimes: a frame is not where the packets said."""
        times = self.line.starts
        with self._opened() as (container, stream):
            decoded = container.decode(stream)
            at = None
            image = None
            for place in places:
                wanted = times[place]
                if at == wanted and image is not None:
                    yield image
                    continue
                key = bisect_right(self._keys, wanted) - 1
                if key > 0 and self._keys[key] > (times[0] if at is None else at):
                    container.seek(self._keys[key], stream=stream)
                    decoded = container.decode(stream)
                for frame in decoded:
                    at = frame.pts
                    if at is None or at >= wanted:
                        break
                if at != wanted:
                    raise _OtherTimes
                image = self._upright(frame)
                yield image

    def _by_time(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """The frames, of a file decoded from its begin; where one cannot be decoded, as those that
        lean on what a cut took away, the one that shows before it, or else the first."""
        wanted = [self.line.starts[place] for place in places]
        with self._opened() as (container, stream):
            before = None
            for frame in container.decode(stream):
                at = frame.pts
                while wanted and at is not None and at >= wanted[0]:
                    shown = frame if at == wanted[0] or before is None else before
                    wanted.pop(0)
                    yield self._upright(shown)
                if not wanted:
                    return
                before = frame
        raise ImageError(self.name, "its last frames cannot be decoded")

    def _by_number(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """The frames, counted from the first one that can be decoded."""
        wanted = list(places)
        with self._opened() as (container, stream):
            for k, frame in enumerate(container.decode(stream)):
                image = self._upright(frame) if wanted and wanted[0] == k else None
                while image is not None and wanted and wanted[0] == k:
                    wanted.pop(0)
                    yield image
                if not wanted:
                    return
        raise ImageError(
            self.name, f"frame {wanted[0]} of {len(self.line)} cannot be decoded"
        )

    def _upright(self, frame: Any) -> Image.Image:
        """A frame as its display matrix turns it."""
        if frame.is_corrupt:
            raise ImageError(self.name, "a frame is damaged")
        # One thread: others would cost each frame more time than they save, and workers decode
        # beside each other.
        image: Image.Image = self._scaler.reformat(
            frame, format="rgb24", threads=1
        ).to_image()
        turn = None
        if (matrix := frame.side_data.get("DISPLAYMATRIX")) is not None:
            a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
            turn = _TURNS.get(tuple((n > 0) - (n < 0) for n in (a, b, c, d)))
        return image if turn is None else image.transpose(turn)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and the stream that FFmpeg calls the best, as its own tools, torchcodec and
        decord take it (by disposition, then bit rate and number of frames); what PyAV raises
        becomes an ImageError."""
        try:
            import av
        except ImportError:
            raise DataError(MISSING) from None
        self.file.seek(0)
        try:
            options = {"format_whitelist": FORMATS}
            # A title of other bytes than UTF-8 is no reason not to read the frames.
            with av.open(
                self.file, "r", options=options, metadata_errors="replace"
            ) as container:
                moving = [
                    stream
                    for stream in container.streams.video
                    if not stream.disposition & stream.disposition.attached_pic
                ]
                if not moving:
                    raise ImageError(self.name, "it has no video stream")
                stream = container.streams.best("video")
                if (
                    stream not in moving
                ):  # a cover picture may be called the default stream
                    stream = moving[0]
                self._scaler = av.video.reformatter.VideoReformatter()
                context = stream.codec_context
                most = Image.MAX_IMAGE_PIXELS
                if context is None:
                    raise ImageError(
                        self.name, "its codec is not built into PyAV's FFmpeg"
                    )
                context.thread_count = 1
                context.options = {"err_detect": "explode"}
                if most and context.width * context.height > most:
                    size = f"{context.width} x {context.height}"
                    raise ImageError(
                        self.name,
                        f"too many pixels: {size} a frame, expected at most {most}",
                    )
                yield container, stream
        except av.error.FFmpegError as error:
            # FFmpeg's ENOMEM, a MemoryError of Python's too, mostly is a size in a damaged file
            # that no machine has.
            text = str(
                error.strerror or one_line(error)
            )  # without FFmpeg's error numbers
            why = f"not a video that FFmpeg reads ({text[0].lower()}{text[1:]})"
            raise ImageError(self.name, why) from None
        except OSError as error:
            raise ImageError(self.name, reason(error)) from None

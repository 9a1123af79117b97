"""Frames of video files: each kind, seeks, times, turned and damaged ones."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.clip_files import grey, turn, which, write_sound, write_video
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.videos import Video

KINDS: dict[str, dict[str, Any]] = {
    "a.mp4": {},
    "b.mp4": {"codec": "libx265", "pixel_format": "yuv420p10le"},  # 10 bits
    "c.mov": {"codec": "mpeg4"},
    "d.mkv": {},
    "e.webm": {"codec": "libvpx-vp9"},
    "f.avi": {"codec": "mpeg4"},
    "g.avi": {"codec": "libx264"},  # the order of its packets is not that of its frames
    "h.gif": {"codec": "gif", "pixel_format": "rgb8"},
    "i.mp4": {"codec": "libsvtav1"},
}


def opened(path: Path) -> Video:
    return Video(path.name, path.open("rb"))


def all_frames(path: Path) -> list[np.ndarray[Any, Any]]:
    """Every frame, by a plain loop over the decoder's output."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_frames_that_are_asked_for(
    tmp_path: Path, name: str
) -> None:
    path = write_video(tmp_path / name, 24, **KINDS[name])
    whole, video = all_frames(path), opened(path)
    assert len(video.line) == len(whole) == 24
    for places in ([0], [23], [0, 5, 11, 23], [7, 8, 9], [2, 2, 13, 13], list(range(24))):
        found = list(video.frames(places))
        assert [which(image) for image in found] == places
        for image, place in zip(found, places, strict=True):
            assert image.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(image), whole[place])
    video.close()
    assert video.line.tick_seconds is not None
    length = (video.line.end - video.line.starts[0]) * video.line.tick_seconds
    assert length == pytest.approx(2.4, abs=0.02)


def test_only_what_lies_behind_the_last_keyframe_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keyframes at 0, 8, 16, ...: frame 90 of 96 costs 3 frames, 3 and 91 cost 8."""
    path = write_video(
        tmp_path / "a.mp4", 96, frames=[grey(k % 24) for k in range(96)], bf="0"
    )
    video, decoded = opened(path), list[int]()
    opened_as = av.open

    class Counting:
        def __init__(self, container: Any) -> None:
            self._container = container

        def __getattr__(self, name: str) -> Any:
            return getattr(self._container, name)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            self._container.close()

        def decode(self, stream: Any) -> Any:
            for frame in self._container.decode(stream):
                decoded.append(frame.pts)
                yield frame

    monkeypatch.setattr(av, "open", lambda *a, **k: Counting(opened_as(*a, **k)))
    assert [which(i) for i in video.frames([90])] == [90 % 24]
    assert len(decoded) == 90 - 88 + 1
    decoded.clear()
    assert [which(i) for i in video.frames([3, 91])] == [3, 91 % 24]
    assert len(decoded) == 4 + 4


def test_times_of_a_varying_rate(tmp_path: Path) -> None:
    at = [0, 100, 200, 300, 400, 500, 1500, 2500, 3500, 4500]
    for name in ("a.mp4", "a.mkv"):
        video = opened(write_video(tmp_path / name, 10, at_ms=at))
        assert video.line.tick_seconds is not None
        seconds = [
            round(start * video.line.tick_seconds, 4) for start in video.line.starts
        ]
        assert seconds == [ms / 1000 for ms in at]
        assert [which(image) for image in video.frames([5, 6, 9])] == [5, 6, 9]


def test_a_clip_cut_out_of_a_longer_one(tmp_path: Path) -> None:
    """Cut without decoding at a keyframe in whose frames earlier ones lean: the first that can be
    decoded stands for those, the others are right."""
    lean = (
        "open-gop=1:bframes=3:b-adapt=0:scenecut=0:keyint=8:min-keyint=8:log-level=none"
    )
    given: dict[str, Any] = {"codec": "libx265", "x265-params": lean}
    whole = write_video(tmp_path / "whole.mkv", 24, **given)
    path = tmp_path / "cut.mkv"
    with av.open(str(whole)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        keys = 0
        for packet in old.demux(video=0):
            keys += packet.is_keyframe and packet.size > 0
            if keys > 1 and packet.size:
                packet.stream = stream
                new.mux(packet)
    decoded, video = [which(frame) for frame in all_frames(path)], opened(path)
    missing = len(video.line) - len(decoded)
    assert missing > 0, "frames that lean on what was cut off"
    found = [which(image) for image in video.frames(range(len(video.line)))]
    assert found == [decoded[0]] * missing + decoded
    assert [which(image) for image in video.frames([0, missing, len(found) - 1])] == [
        decoded[0], decoded[0], decoded[-1]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("matrix", "quarters", "mirrored"),
    [
        *[
            ((1, 0, 0, 1), 0, False),
            ((0, 1, -1, 0), 3, False),
            ((-1, 0, 0, -1), 2, False),
        ],
        *[((0, -1, 1, 0), 1, False), ((-1, 0, 0, 1), 0, True), ((1, 0, 0, -1), 2, True)],
        *[((0, 1, 1, 0), 1, True), ((0, -1, -1, 0), 3, True)],
    ],
)
def test_turned_videos_are_upright(
    tmp_path: Path, matrix: tuple[int, int, int, int], quarters: int, mirrored: bool
) -> None:
    """The matrix of a phone held upright, x' = -y, y' = x, turns clockwise by a quarter: three
    quarters of numpy's rot90; one of a mirrored camera, x' = -x, exchanges left and right first.
    Left half black, right half white, above a grey strip."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, 32:] = 255
    picture[:16] = 128
    path = write_video(tmp_path / "a.mp4", frames=[picture] * 3)
    plain = all_frames(path)[1]
    (image,) = opened(turn(path, matrix)).frames([1])
    expected = np.rot90(plain[:, ::-1] if mirrored else plain, quarters)
    np.testing.assert_array_equal(np.asarray(image), expected)
    x, y = matrix[0] * 8 + matrix[2] * 30, matrix[1] * 8 + matrix[3] * 30  # a black pixel
    height, width = np.asarray(image).shape[:2]
    assert np.asarray(image)[y % height, x % width].max() < 40


def broken_in_the_middle(data: bytes) -> bytes:
    begin = data.index(b"mdat")
    out = bytearray(data)
    for k in range(begin + 400, begin + 1000):
        out[k] ^= 0x5A
    return bytes(out)


DAMAGED: dict[str, tuple[str, Any, str]] = {
    "empty": ("a.mp4", lambda d: b"", "the file is empty"),
    "text": ("a.mp4", lambda d: b"no video" * 99, "not a video that FFmpeg reads"),
    "without its index": ("a.mp4", lambda d: d[: len(d) // 2], "not a video that FFmpeg reads"),
    "cut Matroska": ("d.mkv", lambda d: d[: len(d) * 2 // 3], "it is cut short"),
    "cut WebM": ("e.webm", lambda d: d[: len(d) * 2 // 3], "it is cut short"),
    "cut GIF": ("h.gif", lambda d: d[: len(d) // 2], "it is cut short"),
    "a list that leads elsewhere": (
        "a.mp4", lambda d: b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n", "not a video",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_say_why(tmp_path: Path, case: str) -> None:
    name, damage, said = DAMAGED[case]
    path = write_video(tmp_path / name, **KINDS[name])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ImageError) as error:
        opened(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_frame_that_cannot_be_decoded(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.mp4",
        frames=list(np.random.default_rng(0).integers(0, 256, (24, 48, 64, 3), np.uint8)),
    )
    path.write_bytes(broken_in_the_middle(path.read_bytes()))
    with pytest.raises(ImageError):
        list(opened(path).frames(list(range(24))))


def test_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"b\.mp4: it has no video stream"):
        opened(write_sound(tmp_path / "b.mp4"))


def test_frames_too_large_to_be_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "a.mp4", 3)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 64 * 48 - 1)
    with pytest.raises(
        ImageError, match="too many pixels: 64 x 48 a frame, expected at most 3071"
    ):
        opened(path)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'vitsee\[video\]'"):
        Video("a.mp4", io.BytesIO(b"x"))

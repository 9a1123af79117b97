"""Clips as samples: which files and folders are clips, their labels, hashes, pixels, and errors."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clip_files import grey, which, write_frames, write_video
from vitsee_core.images import Batch, DataError, Selection, batches, open_source, select
from vitsee_core.images.sources.base import SourceRequest

TRANSFORM: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
}


def transform(frames: int, every: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        **TRANSFORM,
        "clip": {"frames": frames, "every": every, "time": "ordered", **more},
    }


def in_order(data: Path | str, **options: Any) -> Selection:
    return select(open_source(str(data), clips=True, **options), order="dataset")


def loaded(selection: Selection, about: dict[str, Any], workers: int = 0) -> Batch:
    """All clips as one batch."""
    (batch,) = batches(selection, about, [slice(0, len(selection))], workers=workers)
    return batch


def shown(batch: Batch) -> list[list[int]]:
    """Which frames the model would see of each clip."""
    return [[which(frame) for frame in clip] for clip in batch.pixels.numpy()]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A class folder each for two kinds of clips, and one that is none."""
    root = tmp_path / "videos"
    for k in range(4):
        write_video(root / f"class{k % 2}" / f"{k}.mp4", 12 + k)
    (root / "class1" / "broken.mp4").write_bytes(b"no video")
    (root / "class1" / "poster.jpg").write_bytes(b"an image beside them")
    return root


def test_a_folder_of_videos(videos: Path, caplog: pytest.LogCaptureFixture) -> None:
    selection = in_order(videos)
    assert "1 image beside videos" in caplog.text
    assert selection.samples.ids == [
        "class0/0.mp4", "class0/2.mp4", "class1/1.mp4", "class1/3.mp4", "class1/broken.mp4"
    ]  # fmt: skip
    assert selection.class_names == ["class0", "class1"]
    assert selection.samples.labels.tolist() == [0, 0, 1, 1, 1]
    batch = loaded(selection, transform(4))
    assert batch.pixels.shape == (5, 4, 3, 32, 32)
    # 12 frames in 4 parts of 3 begin their middles at 1.5, 4.5, ...; 14 frames at 1.75, 5.25, ...
    assert shown(batch)[:2] == [[1, 4, 7, 10], [1, 5, 8, 12]]
    assert batch.valid.tolist() == [True] * 4 + [False]
    assert batch.size.tolist() == [[48, 64]] * 4 + [[0, 0]]
    assert not batch.pixels[4].any()
    np.testing.assert_allclose(batch.seconds[:2], [1.2 / 4, 1.4 / 4], rtol=1e-6)
    assert np.isnan(batch.seconds[4])
    (error,) = batch.errors
    assert error[:2] == (4, "class1/broken.mp4")
    assert "not a video that FFmpeg reads" in error[2]
    bytes_of = (videos / "class0" / "0.mp4").read_bytes()
    digest = hashlib.blake2b(bytes_of, digest_size=8).digest()
    assert int(batch.hash[0]) == int.from_bytes(digest, "little")
    assert selection.source.hash(0) == int(batch.hash[0])
    assert selection.source.size(0) == (48, 64)


@pytest.mark.slow
def test_workers_load_the_same(videos: Path) -> None:
    selection, about = in_order(videos), transform(4, time="shuffled", seed=3)
    here, there = loaded(selection, about), loaded(selection, about, workers=2)
    for name in ("valid", "hash", "size", "seconds"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    assert bool((here.pixels == there.pixels).all())
    assert here.errors == there.errors


def test_orders_of_time(videos: Path) -> None:
    selection = in_order(videos)
    plain = shown(loaded(selection, transform(4)))[:4]
    still = shown(loaded(selection, transform(4, time="still")))[:4]
    assert still == [[clip[2]] * 4 for clip in plain]
    mixed = shown(loaded(selection, transform(4, time="shuffled")))[:4]
    assert [sorted(clip) for clip in mixed] == plain
    assert all(clip != own for clip, own in zip(mixed, plain, strict=True))
    other = shown(loaded(selection, transform(4, time="shuffled", seed=1)))[:4]
    assert mixed != other


def test_folders_of_frames(tmp_path: Path) -> None:
    """Folders in the layout of DAVIS: frame 2 comes before frame 10, and a clip whose frames have
    two sizes is unreadable."""
    root = tmp_path / "480p"
    write_frames(root / "bear", [grey(k) for k in range(12)], digits=1)
    write_frames(root / "camel", [grey(k) for k in range(6)])
    write_frames(root / "dog", [grey(k, (48, 64 if k else 60)) for k in range(6)])
    (root / "camel" / "00003.png").write_bytes(b"no image")
    selection = in_order(root)
    assert selection.samples.ids == ["bear", "camel", "dog"]
    assert selection.class_names is None
    batch = loaded(selection, transform(6))
    assert shown(batch)[0] == [1, 3, 5, 7, 9, 11]
    assert batch.valid.tolist() == [True, False, False]
    assert np.isnan(batch.seconds).all()
    assert "its frame 00003.png: not an image" in batch.errors[0][2]
    assert "several sizes: 60 x 48 and 64 x 48; expected one" in batch.errors[1][2]
    assert loaded(selection, transform(3)).valid.tolist() == [True, False, True], (
        "frames 1, 3, 5"
    )
    each = [
        hashlib.blake2b((root / "bear" / f"{k}.png").read_bytes(), digest_size=8).digest()
        for k in range(12)
    ]
    whole = hashlib.blake2b(b"".join(each), digest_size=8).digest()
    assert int(batch.hash[0]) == int.from_bytes(whole, "little")


def test_class_folders_of_folders_of_frames(tmp_path: Path) -> None:
    for name in ("up/a", "up/b", "down/a"):
        write_frames(tmp_path / "data" / name, [grey(k) for k in range(2)])
    samples = in_order(tmp_path / "data").samples
    assert (samples.ids, samples.labels.tolist()) == (
        ["down/a", "up/a", "up/b"],
        [0, 1, 1],
    )


def test_lists_of_videos_and_folders(videos: Path) -> None:
    write_frames(videos.parent / "frames", [grey(k) for k in range(8)])
    rows = ["path,label,split", "videos/class0/0.mp4,jump,train", "frames,run,test"]
    table = videos.parent / "list.csv"
    table.write_text("\n".join(rows))
    selection = in_order(table)
    assert selection.class_names == ["jump", "run"]
    assert selection.samples.splits == ["train", "test"]
    assert shown(loaded(selection, transform(2))) == [[3, 9], [2, 6]]
    assert in_order(table, split="test").samples.ids == ["frames"]
    table.write_text("path,box\nframes,0 0 2 2\n")
    with pytest.raises(DataError, match="has boxes, which clips do not have"):
        in_order(table)


def test_tars_and_zips(videos: Path) -> None:
    first, second = videos / "class0" / "0.mp4", videos / "class1" / "1.mp4"
    with tarfile.open(videos.parent / "a.tar", "w") as tar:
        for key, path in (("x", first), ("y", second)):
            tar.add(path, f"{key}.mp4")
            label = videos.parent / f"{key}.cls"
            label.write_text(str(len(key) + (key == "y")))
            tar.add(label, label.name)
    with zipfile.ZipFile(videos.parent / "a.zip", "w") as archive:
        archive.write(first, "in/x.mp4")
        archive.write(second, "out/y.mp4")
    for name, labels in (("a.tar", [1, 2]), ("a.zip", [0, 1])):
        selection = in_order(videos.parent / name)
        assert selection.samples.labels.tolist() == labels
        assert shown(loaded(selection, transform(3))) == [[2, 6, 10], [2, 6, 10]]
    globbed = in_order(f"{videos}/class0/*.mp4")
    assert globbed.samples.ids == ["0.mp4", "2.mp4"]


def test_a_changed_length_is_one_unreadable_clip(videos: Path) -> None:
    batch = loaded(in_order(videos), transform(13))
    assert batch.valid.tolist() == [False, True, True, True, False]
    assert batch.errors[0] == (
        0,
        "class0/0.mp4",
        "it has 12 frames; 13 frames were asked for",
    )
    with pytest.raises(Exception, match=r"class0/0\.mp4.*12 frames"):
        list(batches(in_order(videos), transform(13), [slice(0, 5)], on_error="fail"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("demo:test", "demo:test has images, no clips; expected a folder of videos"),
        ("{}/flat", "images lie in .*flat itself, which is one clip or none"),
        ("{}/nothing", "no clips in .*nothing; expected a folder of videos"),
        ("{}/a.npz", "a.npz has images, no clips"),
        ("{}/a.zip", "no videos in .*a.zip; expected .mp4"),
    ],
)
def test_data_without_clips(tmp_path: Path, data: str, said: str) -> None:
    write_frames(tmp_path / "flat", [grey(0)])
    (tmp_path / "nothing").mkdir()
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 8, 8, 3), np.uint8))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", b"x")
    with pytest.raises(DataError, match=said):
        open_source(data.format(tmp_path), clips=True)


def test_videos_need_pyav_and_frames_do_not(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_frames(tmp_path / "frames" / "a", [grey(0)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'vitsee\[video\]'"):
        open_source(str(videos), clips=True)
    assert len(open_source(str(tmp_path / "frames"), clips=True)) == 1


def test_images_are_no_clips_and_are_listed_as_before(
    videos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (videos / "class0" / "moving.gif").write_bytes(b"x")
    assert open_source(str(videos)).ids == ["class0/moving.gif", "class1/poster.jpg"]
    assert caplog.messages == [f"5 files are left out of {videos} by the ending: 5 .mp4"]
    (videos / "class1" / "poster.jpg").unlink()  # GIFs alone may be meant as clips
    n = len(
        [path for path in videos.rglob("*.*") if path.suffix in (".mp4", ".mov", ".webm")]
    )
    assert open_source(str(videos)).ids == ["class0/moving.gif"]
    assert (
        f"{n} videos beside GIFs in {videos} are left out: of clips give" in caplog.text
    )
    asked = SourceRequest("x")
    assert asked.wants("a/b.png")
    assert not asked.wants("a/b.mp4")
    shutil.rmtree(videos)

"""Images in tar shards and parquet files: the folder's images, byte for byte, in its order; what is
wrong with data in one line."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

import vitsee
from tests.image_files import encoded
from tests.shards import (
    make_images,
    noise,
    with_labels,
    write_folder,
    write_parquet,
    write_shards,
    write_tar,
)
from vitsee_cli.main import main
from vitsee_core.images import DataError, ImageError, ImageSource, open_source, select
from vitsee_core.images.decoding import hash64
from vitsee_core.images.sources import archives, placed, tar_index
from vitsee_core.images.sources.base import expand_braces
from vitsee_core.runtime.progress import Tally
from vitsee_stores import open_store, require_paired, validate

IMAGES = make_images()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitsee"


def every_form(root: Path) -> dict[str, str]:
    """The same images in each form that has them."""
    shards = write_shards(root / "shards", IMAGES, 8)
    names = [f"in1k-{k:04d}.tar" for k in range(8)]
    (root / "shards" / "list.txt").write_text("\n".join(names))
    half = list(IMAGES.items())
    write_parquet(root / "data" / "train-00000-of-00002.parquet", dict(half[:10]))
    write_parquet(root / "data" / "train-00001-of-00002.parquet", dict(half[10:]))
    return {
        "one tar": str(write_tar(root / "one" / "all.tar", with_labels(IMAGES))),
        "8 tars": shards,
        "glob": f"{root}/shards/*.tar",
        "folder of tars": f"{root}/shards",
        "list": f"{root}/shards/list.txt",
        "json": write_shards(root / "json", IMAGES, 2, "json"),
        "txt": write_shards(root / "txt", IMAGES, 2, "txt"),
        "no labels": str(write_tar(root / "plain.tar", list(IMAGES.items()))),
        "glob of images": f"{write_folder(root / 'folder', IMAGES)}/*/*.png",
        "one parquet": str(write_parquet(root / "one.parquet", IMAGES)),
        "parquets": f"{root}/data/*.parquet",
        "folder of parquets": str(root / "data"),
    }


def assert_same(source: ImageSource, folder: ImageSource) -> None:
    assert list(source.ids) == list(folder.ids)
    np.testing.assert_array_equal(source.labels, folder.labels)
    for k in range(len(folder)):
        image, value = source.read(k)
        expected, wanted = folder.read(k)
        assert value == wanted == source.hash(k) and source.size(k) == folder.size(k)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    with pytest.raises(IndexError):
        source.locations[len(folder)]


def test_every_form_has_the_images_of_the_folder(tmp_path: Path) -> None:
    folder = open_source(str(write_folder(tmp_path / "folder", IMAGES)))
    chosen = select(folder, images=7, seed=3).samples
    for name, data in every_form(tmp_path).items():
        source = open_source(data)
        assert_same(source, folder)
        assert (
            select(source, images=7, seed=3).samples.fingerprint() == chosen.fingerprint()
        ), name
        part = open_source(data, split="all[5:9]")
        assert (
            list(part.ids) == list(folder.ids)[5:9]
            and part.read(2)[1] == folder.read(7)[1]
        )


def extract(data: str, store: Path, *more: str) -> None:
    words = [
        "extract",
        "demo:vit",
        "--data",
        data,
        "-o",
        str(store),
        "--slab",
        "8",
        *more,
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output


def contents(store: Path) -> dict[str, bytes]:
    """Every file but the manifest and the commit markers, which name the data and the time."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and "/c" in str(path) and "commits" not in path.parts
    }


@pytest.mark.slow
def test_stores_of_every_form_are_equal_and_pair(tmp_path: Path) -> None:
    """Also with workers, of which each opens the files anew."""
    extract(str(write_folder(tmp_path / "folder", IMAGES)), tmp_path / "folder.zarr")
    expected = contents(tmp_path / "folder.zarr")
    assert len(expected) > 20
    forms = every_form(tmp_path)
    for name, workers in (
        ("one tar", 0),
        ("8 tars", 2),
        ("one parquet", 2),
        ("parquets", 0),
    ):
        store = tmp_path / f"{name.replace(' ', '-')}.zarr"
        extract(forms[name], store, "--workers", str(workers))
        found = contents(store)
        assert found.keys() == expected.keys()
        assert all("split" in n or found[n] == expected[n] for n in expected)
        assert validate(store, deep=True) == []
        require_paired(open_store(store), open_store(tmp_path / "folder.zarr"))
    only = tmp_path / "only.txt"
    only.write_text("c1\nc2/002.png\n")
    extract(
        forms["8 tars"], tmp_path / "only.zarr", "--only", str(only), "--tokens", "pooled"
    )
    chosen = {path for path in IMAGES if path.startswith("c1")} | {"c2/002.png"}
    assert set(open_store(tmp_path / "only.zarr").samples.id) == chosen
    # Another form resumes what one began, as it would a folder that moved.
    extract(forms["8 tars"], tmp_path / "mixed.zarr", "--shard", "0/2")
    extract(forms["one parquet"], tmp_path / "mixed.zarr", "--shard", "1/2")
    assert contents(tmp_path / "mixed.zarr").items() <= expected.items()


def test_labels_as_names_and_by_key(tmp_path: Path) -> None:
    about = [
        {"label": None, "class": "dog", "id": 7},
        {"class": "cat", "id": 7},
        {"id": 9},
    ]
    members = []
    for k, record in enumerate(about):
        members += [
            (f"{k}.jpg", encoded(k, "JPEG")),
            (f"{k}.json", json.dumps(record).encode()),
        ]
        members += [(f"{k}.txt", b"a photo"), (f"{k}.seg.png", encoded(9))]
    data = str(write_tar(tmp_path / "a.tar", members))
    source = open_source(data)
    assert source.class_names == ["cat", "dog"] and source.labels.tolist() == [1, 0, -1]
    assert list(source.ids) == ["0.jpg", "1.jpg", "2.jpg"]  # a map beside it is no image
    assert open_source(data, label_key="id").labels.tolist() == [7, 7, 9]
    source = open_source(data, label_key="txt")
    assert source.class_names == ["a photo"] and source.labels.tolist() == [0, 0, 0]
    # Captions are no labels unless they are asked for.
    captions = [(f"{k}.{end}", data) for k in range(2) for end, data in (
        ("txt", b"a dog"), ("webp", encoded(k, "WEBP")))]  # fmt: skip
    source = open_source(str(write_tar(tmp_path / "b.tar", captions)))
    assert source.labels.tolist() == [-1, -1] and source.class_names is None


def test_labels_that_come_before_after_and_far_from_their_images(tmp_path: Path) -> None:
    members = with_labels(IMAGES)
    order = np.random.default_rng(0).permutation(len(members))
    data = write_tar(tmp_path / "a.tar", [members[k] for k in order])
    assert_same(
        open_source(str(data)), open_source(str(write_folder(tmp_path / "f", IMAGES)))
    )


def test_paths_of_two_shards_that_are_alike_get_the_shards_names(tmp_path: Path) -> None:
    for k in range(2):
        write_tar(tmp_path / f"s{k}.tar", [("0.cls", b"1"), ("0.png", encoded(k))])
    source = open_source(f"{tmp_path}/s{{0,1}}.tar")
    assert list(source.ids) == ["s0/0.png", "s1/0.png"] and source.labels.tolist() == [
        1,
        1,
    ]
    assert source.read(1)[1] == hash64(encoded(1))


@pytest.mark.parametrize(
    "form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]
)
def test_members_are_where_tarfile_finds_them(form: int, tmp_path: Path) -> None:
    """Long names, names outside ASCII, folders, links; and an oracle that reads all of it."""
    long = "d" * 90 + "/" + "n" * 90 + ".png"
    names = [
        "a.png",
        long,
        "ü/" + "é" * 20 + ".png",
        "deep/" * 12 + "x.png",
        "./dot/y.png",
    ]
    path = write_tar(
        tmp_path / "a.tar", [(n, noise(k)) for k, n in enumerate(names)], form
    )
    (tmp_path / "last.png").write_bytes(noise(9))
    with tarfile.open(path, "a", format=form) as tar:
        tar.add(tmp_path, "folder.png", recursive=False)
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "a.png"
        tar.addfile(link)
        link.type, link.size = (
            tarfile.LNKTYPE,
            5000,
        )  # of the file that it is, not of what follows
        tar.addfile(link)
        tar.add(path.with_name("last.png"), "z/last.png")
    with tarfile.open(path) as tar:
        expected = {
            m.name.removeprefix("./"): tar.extractfile(m).read()  # type: ignore[union-attr]
            for m in tar
            if m.isreg()
        }
    source = open_source(str(path))
    assert list(source.ids) == sorted(expected)
    assert [source.hash(k) for k in range(6)] == [hash64(expected[i]) for i in source.ids]


# the kept index -------------------------------------------------------------------------------


def test_the_index_is_kept_and_only_changed_shards_are_read_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "CACHE_AFTER_SECONDS", 0.0)
    data, read = write_shards(tmp_path / "s", IMAGES, 4), []
    index_tar = tar_index.index_tar

    def counted(files: Any, name: str, **options: Any) -> Any:
        read.append(name)
        return index_tar(files, name, **options)

    monkeypatch.setattr(archives, "index_tar", counted)
    progress = Tally()
    first = open_source(data, progress=progress)
    assert (len(read), progress.count) == (4, 4)
    (kept,) = own_cache.glob("*.tars.npz")
    assert_same(open_source(data), first)
    assert len(read) == 4
    # Another tar of the same size under the same name, behind the index.
    changed = tmp_path / "s" / "in1k-0002.tar"
    old = changed.stat()
    part = dict(list(IMAGES.items())[2::4])
    write_tar(
        changed, [(n, d[::-1] if n.endswith("cls") else d) for n, d in with_labels(part)]
    )
    os.utime(changed, ns=(old.st_atime_ns, old.st_mtime_ns + 10))
    assert_same(open_source(data), first)
    assert read[4:] == ["in1k-0002.tar"]
    open_source(data, label_key="cls")  # labels from elsewhere: another index
    assert len(read) == 9 and len(list(own_cache.glob("*.tars.npz"))) == 2
    whole = kept.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * 500):
        kept.write_bytes(damaged)
        assert_same(open_source(data), first)
    assert len(read) == 9 + 3 * 4
    listed = CliRunner().invoke(main, ["cache", "ls"])
    assert str(kept) in listed.stdout, listed.output
    removed = CliRunner().invoke(main, ["cache", "rm", str(own_cache)])
    assert removed.exit_code == 0 and not list(own_cache.glob("*"))


def test_an_index_that_cannot_be_kept_is_no_error(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "CACHE_AFTER_SECONDS", 0.0)
    own_cache.parent.mkdir()
    own_cache.write_text("a file where the folder should be")
    assert len(open_source(write_shards(tmp_path, IMAGES, 2))) == len(IMAGES)


def test_a_small_index_is_not_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "CACHE_AFTER_SECONDS", 60.0)
    open_source(write_shards(tmp_path, IMAGES, 2))
    assert not own_cache.exists()


def test_a_shard_that_changes_while_it_is_read_is_bad_images(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", with_labels(IMAGES))
    source = open_source(str(path))
    write_tar(path, [("other.bin", bytes(200_000))])
    with pytest.raises(ImageError, match=r"cannot read c0/000.png: the tar file changed"):
        source.read(0)


# parquet --------------------------------------------------------------------------------------


def test_parquet_columns_names_and_rows(tmp_path: Path) -> None:
    features = {"kind": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}}
    table = pyarrow.table(
        {
            "raw": [encoded(1), None, encoded(3)],
            "pic": [
                {"bytes": encoded(4), "path": None},
                {"bytes": b"x", "path": None},
                None,
            ],
            "kind": pyarrow.array([2, None, 0], pyarrow.int16()),
            "word": ["b", "a", None],
        }
    )
    about = json.dumps({"info": {"features": features}})
    table = table.replace_schema_metadata({"huggingface": about})
    for name in ("test-0.parquet", "train-0.parquet"):
        parquet.write_table(table, tmp_path / name)
    source = open_source(str(tmp_path), label_column="kind", split="train")
    assert source.ids == ["train-0/0", "train-0/1", "train-0/2"]
    assert source.class_names == ["cat", "dog", "emu"] and source.labels.tolist() == [
        2,
        -1,
        0,
    ]
    assert source.read(0)[1] == hash64(encoded(4))
    for row, reason in ((1, "not an image"), (2, "the row has no image")):
        with pytest.raises(ImageError, match=rf"cannot read train-0/{row}: {reason}"):
            source.read(row)
    source = open_source(
        f"{tmp_path}/t*.parquet", image_column="raw", label_column="word"
    )
    assert source.class_names == ["a", "b"] and source.labels.tolist() == [1, 0, -1] * 2
    assert source.read(5)[1] == hash64(encoded(3))
    assert open_source(str(tmp_path)).labels.tolist() == [-1] * 6


def test_large_row_groups_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitsee_core.images.sources.parquet.LARGE_GROUP_BYTES", 100)
    with caplog.at_level("INFO"):
        open_source(str(write_parquet(tmp_path / "a.parquet", IMAGES, group=24)))
    assert (
        "row groups of up to" in caplog.text
        and "--order dataset reads each once" in caplog.text
    )


# names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a{2..4}", ["a2", "a3", "a4"]),
        ("a{08..10}.t", ["a08.t", "a09.t", "a10.t"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{x,y}{0..1}", ["x0", "x1", "y0", "y1"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("{tr,v}-{00..01}", ["tr-00", "tr-01", "v-00", "v-01"]),
    ],
)
def test_braces(text: str, names: list[str]) -> None:
    assert expand_braces(text) == names


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("a{0..3", "has a brace without its other half"),
        ("a0..3}", "has a brace without its other half"),
        ("a{0..}", r"cannot read {0\.\.}; expected a range of numbers"),
        ("a{}", "cannot read {}; expected"),
        ("a{a..f}", "cannot read {a..f}; expected"),
        ("{0..99999999}", "more than 100000 names"),
        ("{0..9999}{0..9999}", "more than 100000 names"),
    ],
)
def test_braces_that_are_none(text: str, phrase: str) -> None:
    with pytest.raises(DataError, match=phrase):
        expand_braces(text)


def test_names_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "hfds").mkdir()
    for data, expected in {
        "s/{0..3}.tar": f"{tmp_path}/s/{{0..3}}.tar",
        "s3://b/{0..3}.tar": "s3://b/{0..3}.tar",
        "demo:test": "demo:test",
        "torch/mnist:x": f"torch/mnist:{tmp_path}/x",
        "hfds/x": "hfds/x",
        "hfds": f"{tmp_path}/hfds",
        "/data/a.tar": "/data/a.tar",
    }.items():
        assert placed(data, tmp_path) == expected


# what is wrong --------------------------------------------------------------------------------


def cut(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


def tar(root: Path, *members: tuple[str, bytes]) -> Path:
    return write_tar(root / "a.tar", list(members))


P = encoded(1)
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compressed": (
        lambda r: [(r / f"{k}.tar.gz").write_bytes(gzip.compress(P)) for k in range(2)]
        and f"{r}/{{0,1}}.tar.gz",
        r"0.tar.gz is compressed, without random access; unpack it: gunzip .*/0.tar.gz$",
    ),
    "compressed by zstd": (
        lambda r: (r / "a.tar.zst").write_bytes(b"x") and r / "a.tar.zst",
        "unpack it: zstd -d",
    ),
    "compressed, in a folder": (
        lambda r: (r / "a.tgz").write_bytes(gzip.compress(P)) and r,
        "a.tgz is compressed, .* gunzip",
    ),
    "compressed inside": (
        lambda r: (r / "a.tar").write_bytes(gzip.compress(P)) and r / "a.tar",
        "a.tar cannot be read as an uncompressed tar: it is compressed; unpack it: gunzip",
    ),
    "truncated in a member": (
        lambda r: cut(tar(r, ("a.png", bytes(2000))), 1000),
        "a.tar cannot be read as an uncompressed tar: it ends 1512 bytes too early",
    ),
    "truncated in a header": (
        lambda r: cut(tar(r, ("a.png", P), ("b.png", P)), 1200),
        "it ends in the middle of the header at byte 1024",
    ),
    "empty file": (lambda r: cut(tar(r), 0), "uncompressed tar: it is empty"),
    "no tar": (
        lambda r: (r / "a.tar").write_bytes(b"x" * 4096) and r / "a.tar",
        "no header at byte 0, where one should be",
    ),
    "no images": (lambda r: tar(r, ("a.cls", b"1")), "no images in .*a.tar; expected .jpg"),
    "key without image": (
        lambda r: tar(r, ("a.cls", b"1"), ("a.png", P), ("b.cls", b"1")),
        "a.tar has a label of the key b, and no image; expected one of: .jpeg, .jpg, .png, .webp",
    ),
    "two images a key": (
        lambda r: tar(r, ("a.cls", b"1"), ("a.jpg", P), ("a.png", P)),
        r"a.tar has two images of one key, a.jpg and a.png \(--label-key KEY names .*, or none",
    ),
    "two images a key, of two shards": (
        lambda r: tar(r, ("a.cls", b"1"), ("a.jpg", P))
        and write_tar(r / "b.tar", [("a.png", P)])
        and f"{r}/*.tar",
        "has two images of one key, a.jpg and a.png",
    ),
    "no JSON": (
        lambda r: tar(r, ("a.json", b"{"), ("a.png", P)),
        r"a.tar has a label in a.json, which is no JSON \(--label-key KEY names .*, or none",
    ),
    "no text": (
        lambda r: tar(r, ("a.cls", b"\xff"), ("a.png", P)),
        "a label in a.cls, which is no text",
    ),
    "glob without a match": (lambda r: r / "*.tar", r"\*.tar matches nothing; expected files"),
    "a shard is missing": (
        lambda r: tar(r, ("a.png", P)) and f"{r}/{{a,b,c}}.tar",
        "b.tar does not exist, nor 1 more of 3; expected files there",
    ),
    "brace": (lambda r: f"{r}/{{0..}}.tar", r"cannot read {0\.\.}; expected a range"),
    "open brace": (lambda r: f"{r}/{{0..3.tar", "a brace without its other half"),
    "several kinds": (
        lambda r: tar(r, ("a.png", P)) and write_parquet(r / "b.parquet", IMAGES) and f"{r}/*.*",
        "has files of several kinds: .parquet, .tar",
    ),
    "pattern of lists": (
        lambda r: [(r / f"{k}.csv").write_text("path\n") for k in range(2)] and f"{r}/*.csv",
        "expected one file of this kind",
    ),
    "no parquet": (
        lambda r: (r / "a.parquet").write_bytes(b"PAR1xx") and r / "a.parquet",
        "a.parquet cannot be read as parquet: ",
    ),
    "truncated parquet": (
        lambda r: cut(write_parquet(r / "a.parquet", IMAGES), 3000),
        "a.parquet cannot be read as parquet: ",
    ),
    "parquet without images": (
        lambda r: parquet.write_table(pyarrow.table({"x": [1]}), r / "a.parquet")
        or r / "a.parquet",
        r"a.parquet has no column of images; expected one of bytes, or of structs with bytes and "
        r"path; it has: x \(int64\)",
    ),
    "parquet of other bytes": (
        lambda r: parquet.write_table(pyarrow.table({"x": [b"1", b"2"]}), r / "a.parquet")
        or r / "a.parquet",
        r"the column 'x' of .* holds no images \(row 0: not an image.*--image-column",
    ),
    "parquet without rows": (
        lambda r: (write_parquet(r / "a.parquet", IMAGES)
        and parquet.write_table(parquet.read_table(r / "a.parquet")[:0], r / "a.parquet"))
        or r / "a.parquet",
        "a.parquet has no rows; expected images",
    ),
    "parquets that differ": (
        lambda r: (write_parquet(r / "a.parquet", IMAGES)
        and parquet.write_table(pyarrow.table({"img": [P], "label": [1]}), r / "b.parquet"))
        or f"{r}/*.parquet",
        "b.parquet has other columns than .*a.parquet .img against image.bytes",
    ),
    "pipe": (lambda r: "pipe:cat a.tar", "read from front to back, .* no pairing and no resuming"),
    "stream": (lambda r: "hfids/org/name", "read from front to back, .* name its .tar or .parquet"),
    "URL of another kind": (lambda r: "ftp://h/a.tar", "ftp://h/a.tar: images are read at URLs wi"),
    "URL of a hub's model": (lambda r: "hf://models/a/b", "expected hf://datasets/OWNER/NAME"),
    "URL with a query": (lambda r: "https://h/a.tar?k=1", "URLs with a query .* are not supported"),
    "URLs of two buckets": (lambda r: "s3://{a,b}/a.tar", "are not in one place; expected one"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_one_line(case: str, tmp_path: Path) -> None:
    make, phrase = WRONG[case]
    data = str(make(tmp_path))
    with pytest.raises(DataError, match=phrase) as raised:
        open_source(data)
    assert "\n" not in str(raised.value) and not str(raised.value).endswith(".")


OPTIONS = {
    "tars": (
        (
            "label_key",
            "x",
            "no image .* has a label 'x' beside it; expected a field 'x' of KEY.js",
        ),
        ("image_column", "x", "--image-column is of .parquet files; .* has none"),
    ),
    "parquet": (
        ("label_key", "x", "--label-key is of .tar files; .* has none: leave it out"),
        (
            "image_column",
            "x",
            r"has no column 'x' \(--image-column\); it has: image \(struct",
        ),
        ("label_column", "x", r"has no column 'x' \(--label-column\); it has: image"),
        ("image_column", "label", "has no images in the column 'label', which is int64"),
        ("label_column", "image", "has no labels in the column 'image', which is struct"),
    ),
    "folder": (("label_key", "cls", r"--label-key is of \.tar files"),),
}


def test_wrong_options(tmp_path: Path) -> None:
    places = {
        "tars": write_shards(tmp_path, IMAGES, 2, "json"),
        "parquet": str(write_parquet(tmp_path / "a.parquet", IMAGES)),
        "folder": str(write_folder(tmp_path / "folder", IMAGES)),
    }
    for form, data in places.items():
        for name, value, phrase in OPTIONS[form]:
            with pytest.raises(DataError, match=phrase):
                open_source(data, **{name: value})  # type: ignore[arg-type]


def test_a_stream_in_python_is_refused(tmp_path: Path) -> None:
    """As Hugging Face's `streaming=True` gives one."""
    for data, phrase in (
        (
            (image for image in IMAGES),
            "data of the type generator is read from front to back",
        ),
        ([1, 2], "data of the type list has no name; expected what --data takes"),
    ):
        with pytest.raises(DataError, match=phrase):
            vitsee.extract("demo:vit", data, tmp_path / "s.zarr")  # type: ignore[arg-type]


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(write_parquet(tmp_path / "a.parquet", IMAGES))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        DataError, match=r"needs pyarrow; run: pip install 'vitsee.parquet.'"
    ):
        open_source(data)

"""Where outputs may go: never into a store, among images or over an input; and the pictures that
vitsee wrote among images are no images."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import one_line
from tests.features import activations
from tests.image_files import plant
from tests.stores import write_sites
from vitsee_core.images import open_source
from vitsee_core.images.errors import ImageError
from vitsee_core.pages.report.outputs import Outputs, check_outputs
from vitsee_core.tables.files import read_file
from vitsee_stores import remove_store, validate
from vitsee_stores.errors import StoreError, VitseeError


def everything_below(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("export", "STORE", "x", "-o", "STORE/x.npy"),
        ("report", "FOLDER", "-o", "STORE/report.html"),
        ("cka", "STORE", "--cache", "STORE/acts"),
        ("cka", "STORE", "--cache", "STORE"),
        ("cka", "STORE", "-o", "STORE/acts/r.csv"),
        ("extract", "demo:vit", "--data", "demo:test", "-o", "STORE/inner.zarr"),
        ("study", "demo:vit", "--data", "demo:test", "-o", "STORE"),
    ],
)
def test_nothing_is_written_into_a_store(tmp_path: Path, words: tuple[str, ...]) -> None:
    sites = {"x": activations(8), "y": activations(8, seed=1)}
    store = write_sites(tmp_path / "a.zarr", sites).path
    before = everything_below(tmp_path)
    line = one_line(
        *(w.replace("STORE", str(store)).replace("FOLDER", str(tmp_path)) for w in words)
    )
    assert f"results do not go into a store ({store})" in line
    assert everything_below(tmp_path) == before
    assert validate(store, deep=True) == []


def test_a_cache_is_not_made_below_a_missing_folder(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", {"x": activations(8)}).path
    line = one_line("cka", store, "--cache", tmp_path / "no" / "grams")
    assert f"there is no folder {tmp_path / 'no'}" in line


@pytest.mark.slow
@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("of", ["extract", "study"])
def test_nothing_is_written_among_the_images(
    tmp_path: Path, of: str, force: list[str]
) -> None:
    photos = plant(tmp_path / "photos", "a/1.png", "b/2.png")
    if of == "study" and force:
        force = ["--dry-run"]
    line = one_line(of, "demo:vit", "--data", photos, "-o", photos / "a" / "out", *force)
    assert (
        f"is inside the image folder {photos}" in line and "name a place outside" in line
    )
    assert len(list(photos.rglob("*"))) == 4
    check_outputs(Outputs(photos / "r.csv"), images=str(photos))
    with pytest.raises(VitseeError, match=r"r\.png is inside the image folder"):
        check_outputs(Outputs(png=photos / "r.png"), images=str(photos))


def test_what_vitsee_wrote_is_no_data(
    tmp_path: Path, make_store: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    photos = plant(tmp_path / "photos", "a/1.png", "b/2.png", "b/deeper/3.png")
    record = {"command": ["vitsee", "study", "demo:vit"]}
    for below, name in (
        ("a/out", "study.json"),
        ("results", "r.csv.json"),
        ("c", "r.tsv.json"),
    ):
        plant(photos, f"{below}/r.png", f"{below}/results/q.png")
        (photos / below / name).write_text(json.dumps(record))
    shutil.copytree(make_store(), photos / "b" / "s.zarr")
    plant(photos / "b" / "s.zarr", "extra.png")
    source = open_source(str(photos))
    assert list(source.ids) == ["a/1.png", "b/2.png", "b/deeper/3.png"]
    assert source.class_names == ["a", "b"]
    for said in ("a/out (a study)", "b/s.zarr (a store)", "c (results)", "and 1 more"):
        assert said in caplog.text


def test_pictures_of_results_beside_images_are_no_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a command without --data was run in the image folder itself."""
    names = (
        "a/1.png",
        "b/2.png",
        "mine.png",
        "r.png",
        "drawn.png",
        "best.png",
        "cat.png",
    )
    photos = plant(tmp_path / "photos", *names)
    words = ["vitsee", "attn-map", "s.zarr", "--image", "cat.png", "-o", "r.csv"]
    words += ["--png", "drawn.png", "--table", "./best.png"]
    (photos / "r.csv.json").write_text(json.dumps({"command": words}))
    (photos / "mine.csv.json").write_text(
        json.dumps({"command": ["other", "--png", "cat.png"]})
    )
    assert list(open_source(str(photos)).ids) == [
        "a/1.png",
        "b/2.png",
        "cat.png",
        "mine.png",
    ]
    assert "r.png (a picture of results)" in caplog.text and "drawn.png" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[",
        "null",
        '{"command": "vitsee"}',
        '{"command": []}',
        '{"command": ["ls"]}',
    ],
)
def test_what_others_wrote_is_data(tmp_path: Path, text: str) -> None:
    photos = plant(tmp_path / "photos", "a/1.png", "b/2.png")
    (photos / "a" / "study.json").write_text(text)
    (photos / "b" / "labels.csv.json").write_text(text)
    assert list(open_source(str(photos)).ids) == ["a/1.png", "b/2.png"]


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_an_input_is_never_replaced(tmp_path: Path, more: list[str]) -> None:
    table, text = (
        tmp_path / "r.csv",
        "store,site,depth,rel_depth,metric,value\na,x,0,0,top1,0.5\n",
    )
    table.write_text(text)
    (tmp_path / "link.csv").symlink_to(table)
    for output in (("-o", table), ("-o", tmp_path / "link.csv")):
        assert "is an input of this command" in one_line(
            "best-layer", table, *output, *more
        )
    sidecar = tmp_path / "r.csv.json"
    sidecar.write_text(json.dumps({"command": ["vitsee", "knn"]}))
    assert "is an input" in one_line("best-layer", table, "-o", sidecar, *more)
    truth = tmp_path / "truth.csv"
    truth.write_text("query,image,grade\n")
    store = write_sites(tmp_path / "a.zarr", {"x": activations(8)}).path
    words: tuple[Any, ...] = ("retrieve", store, "--truth", truth, "-o", truth, *more)
    assert "is an input of this command" in one_line(*words)
    assert table.read_text() == text and truth.read_text() == "query,image,grade\n"


def test_a_protected_store_is_not_removed(
    tmp_path: Path, make_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    before = everything_below(tmp_path)
    with monkeypatch.context() as patched:  # of root's files too
        patched.setattr(
            "vitsee_stores.folder.os.access",
            lambda path, mode, **_: not path.endswith("acts"),
        )
        with pytest.raises(
            StoreError, match=rf"{store} stays as it is: .*/acts is write-prot"
        ):
            remove_store(store)
    assert everything_below(tmp_path) == before

    def stops(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr("vitsee_stores.folder.shutil.rmtree", stops)
    with pytest.raises(
        StoreError, match=r"is removed but for .*\.removing, .*delete that yourself"
    ):
        remove_store(store)
    assert not store.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("best-layer", "FIFO"),
        ("plot", "FIFO"),
        ("extract", "demo:vit", "--data", "FIFO", "-o", "s.zarr"),
        ("extract", "demo:vit", "--data", "demo:test", "--only", "FIFO", "-o", "s.zarr"),
        (
            "extract",
            "demo:vit",
            "--checkpoint",
            "FIFO",
            "--data",
            "demo:test",
            "-o",
            "s.zarr",
        ),
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, words: tuple[str, ...]) -> None:
    for ending in (".csv", ".zip"):
        fifo = tmp_path / f"pipe{ending}"
        os.mkfifo(fifo)
        line = one_line(*(w.replace("FIFO", str(fifo)) for w in words))
        assert f"{fifo} is a pipe or a device; expected" in line


def test_a_sidecar_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(
        "store,site,depth,rel_depth,metric,value\na,x,0,0,top1,0.5\n"
    )
    os.mkfifo(tmp_path / "r.csv.json")
    assert "has no sidecar r.csv.json" in one_line("plot", tmp_path / "r.csv")
    with pytest.raises(
        VitseeError, match=r"cannot read .*r\.csv\.json: not a regular file"
    ):
        read_file(tmp_path / "r.csv.json")


def test_pipes_among_images(tmp_path: Path) -> None:
    """Neither as an image nor as an archive of images."""
    photos = plant(tmp_path / "photos", "1.png")
    for name in ("2.png", "3.tar", "4.zip"):
        os.mkfifo(photos / name)
    source = open_source(str(photos))
    assert list(source.ids) == ["1.png", "2.png"]
    with pytest.raises(ImageError, match=r"cannot read 2\.png: not a regular file"):
        source.opener.load("2.png")
    (photos / "1.png").unlink()
    (photos / "2.png").unlink()
    with pytest.raises(VitseeError, match="no images below"):
        open_source(str(photos))


def test_an_image_file_of_more_bytes_than_any_has(tmp_path: Path) -> None:
    """A sparse file of 2 GiB is not read."""
    photos = plant(tmp_path / "photos", "1.png")
    with (photos / "1.png").open("r+b") as file:
        file.truncate(2 << 30)
    with pytest.raises(
        ImageError, match="has 2147483648 bytes, expected at most 1073741824"
    ):
        open_source(str(photos)).opener.load("1.png")

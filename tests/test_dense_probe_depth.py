"""Dense probes of depth: against explicit pixels, hand-computed values and what a user sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.printed_text import flat
from tests.stores import write_sites
from tests.tables import having
from tests.test_dense_probe import Array, command, layout, made, transform, upsampled
from vitsee_core.analyses.dense_probe import COLUMNS, run
from vitsee_core.analyses.dense_probe.heads import mean_depths
from vitsee_core.analyses.dense_probe.metrics import depth_errors
from vitsee_core.analyses.dense_probe.pixels import crop_as_eigen
from vitsee_core.demo.depths import miniatures, write_depths
from vitsee_core.images.errors import DataError
from vitsee_core.images.sources import open_source
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.depth_maps import open_depth_maps
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError

SITE = "blocks.0.out"


def made_depths(
    folder: Path, n: int = 8, name: str = "a", seed: int = 0, **more: Any
) -> tuple[Store, Path]:
    """The random tokens of `made`, with a folder of depths in millimetres."""
    store, _ = made(folder, n, name=name, seed=seed, **more)
    depths = folder / f"{name}-depths"
    depths.mkdir()
    for i, (height, width) in enumerate(store.sizes.tolist()):
        rng = np.random.default_rng((seed, i))
        values = rng.integers(500, 9000, (height, width)).astype(np.uint16)
        values[rng.random(values.shape) < 0.2] = 0
        Image.fromarray(values).save(depths / f"{name}{i}.png")
    return store, depths


def every_pixel(store: Store, depths: Path) -> tuple[list[Array], list[Array]]:
    """Features and depths of the pixels of each image that have one."""
    xs, ys = [], []
    for row, name in enumerate(store.samples.id.tolist()):
        y = np.asarray(Image.open(depths / name.replace("jpg", "png"))) / 1000
        x = upsampled(store.acts(SITE, "patches")[row : row + 1][0], y.shape)
        xs.append(x[y.ravel() > 0])
        ys.append(y[y > 0])
    return xs, ys


def by_image(found: list[Array], truth: list[Array]) -> Array:
    """(3,) rmse, abs_rel and a1, of plain formulas."""
    rows = []
    for p, d in zip(found, truth, strict=True):
        rmse, off = np.sqrt(np.mean((p - d) ** 2)), np.mean(np.abs(p - d) / d)
        rows.append([rmse, off, np.mean(np.maximum(p / d, d / p) < 1.25)])
    return np.mean(rows, axis=0)


def values(table: Table, baseline: str = "", **wanted: Any) -> Array:
    rows = having(table, site=SITE, baseline=baseline, **wanted)
    return np.array(
        [having(rows, metric=m)["value"][0] for m in ("rmse", "abs_rel", "a1")]
    )


def test_the_table_equals_that_of_explicit_pixels(tmp_path: Path) -> None:
    train, depths = made_depths(tmp_path)
    test, others = made_depths(tmp_path, 5, "b", 1)
    for own in others.glob("*.png"):
        (depths / own.name).write_bytes(own.read_bytes())
    table = run(
        train,
        test,
        depth=depths,
        depth_scale=1000,
        max_depth=10,
        l2_relative=[0.01],
        sites=[SITE],
    )
    assert tuple(table.written.columns) == tuple(
        name for name in COLUMNS if name != "class"
    )
    x, y = (np.concatenate(part) for part in every_pixel(train, depths))
    centred = x - x.mean(0)
    scatter = centred.T @ centred + 0.01 * len(x) * centred.var(0).mean() * np.eye(5)
    weights = np.linalg.solve(scatter, centred.T @ (y - y.mean()))
    xs, ys = every_pixel(test, others)
    found = [np.clip((x_ - x.mean(0)) @ weights + y.mean(), 0.001, 10) for x_ in xs]
    np.testing.assert_allclose(values(table), by_image(found, ys), rtol=1e-6)
    same = [np.full(len(own), y.mean()) for own in ys]
    np.testing.assert_allclose(values(table, "mean"), by_image(same, ys), rtol=1e-6)
    assert table.notes["truth"]["pixels with a depth"] == "between 0.001 and 10 m"


def test_l2_is_chosen_by_held_out_errors(tmp_path: Path) -> None:
    """Random tokens know nothing: the largest l2 errs least."""
    store, depths = made_depths(tmp_path, 40)
    table = run(store, depth=depths, depth_scale=1000, holdout=0.3, sites=[SITE])
    assert set(having(table, baseline="")["l2_relative"].tolist()) == {100.0}


def test_errors_by_hand() -> None:
    found = depth_errors(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    assert found == pytest.approx((np.sqrt(2), 0.25, 0.5))


def test_errors_above_one_have_intervals_above_one(tmp_path: Path) -> None:
    store, depths = made_depths(tmp_path, 12)
    table = run(
        store,
        depth=depths,
        depth_scale=1000,
        holdout=0.5,
        sites=[SITE],
        l2_relative=[1.0],
    )
    row = having(table, metric="rmse", baseline="")
    assert row["low"][0] < row["value"][0] < row["high"][0]
    assert row["value"][0] > 1


def test_neighbours_give_the_mean_of_their_pixels(tmp_path: Path) -> None:
    train, depths = made_depths(tmp_path, 8)
    table = run(
        train, depth=depths, depth_scale=1000, solver="knn", ks=[3], sites=[SITE],
        resolution="input", holdout=0.4, metrics=["rmse"],
    )  # fmt: skip
    assert np.isfinite(table["value"].astype(float)).all()
    three = np.array(
        [[[1, np.nan, np.nan], [3, np.nan, 5], [np.nan, np.nan, 6]]], np.float32
    )
    assert mean_depths(three).tolist() == [[2, 3.75, 5.5]]


def test_one_neighbour_finds_the_image_itself(tmp_path: Path) -> None:
    """Tested on what it was trained with, at the input's size, k = 1 gives back every depth."""
    store, depths = made_depths(tmp_path, 6)
    table = run(
        store, store, depth=depths, depth_scale=1000, solver="knn", ks=[1], sites=[SITE],
        resolution="input", allow_shared=True,
    )  # fmt: skip
    np.testing.assert_allclose(values(table), [0, 0, 1], atol=1e-7)


def test_the_crop_of_eigen() -> None:
    depths = np.arange(480 * 640, dtype=np.float32).reshape(480, 640)
    found = crop_as_eigen("x", depths)
    assert np.isfinite(found).sum() == (471 - 45) * (601 - 41)
    assert found[45, 41] == depths[45, 41]
    assert (
        np.isnan(found[44, 41]) and np.isnan(found[471, 41]) and np.isnan(found[45, 601])
    )
    with pytest.raises(
        VitseeError, match="x is 5 x 4 pixels; --eigen-crop expects NYU's 640 x"
    ):
        crop_as_eigen("x", np.zeros((4, 5), np.float32))


def test_only_testing_is_cropped(tmp_path: Path) -> None:
    """Half of the images outside of the crop are wrong, which no metric sees."""
    depths = tmp_path / "depths"
    depths.mkdir()
    values_ = np.full((480, 640), 9000, np.uint16)
    values_[45:471, 41:601] = 2000
    for i in range(4):
        Image.fromarray(values_).save(depths / f"{i}.png")
    tokens = np.zeros((4, 12, 2), np.float32)
    store = write_sites(
        tmp_path / "a.zarr", {SITE: (tokens, layout(3, 4))}, ids=[f"{i}.jpg" for i in range(4)],
        sizes=(480, 640), transform=transform(12, 16),
    )  # fmt: skip
    choice: dict[str, Any] = {
        "depth": depths,
        "depth_scale": 1000,
        "holdout": 0.5,
        "l2_relative": [1.0],
    }
    whole, cropped = (
        values(run(store, **choice, eigen_crop=crop)) for crop in (False, True)
    )
    mean = values_.mean() / 1000
    np.testing.assert_allclose(cropped[:2], [mean - 2, (mean - 2) / 2], rtol=1e-5)
    assert whole[0] > cropped[0]


# ---------------------------------------------------------------- files


def write_nyu_file(path: Path, n: int = 6) -> None:
    """The authors' labelled file: MATLAB's header of 512 bytes, then HDF5."""
    h5py = pytest.importorskip("h5py")
    every = [one for one, _ in zip(miniatures(0, n), range(n), strict=False)]
    with h5py.File(path, "w", userblock_size=512) as file:
        file["depths"] = np.stack([one.depths.T for one in every]).astype(np.float32)
        file["images"] = np.stack([one.pixels.transpose(2, 1, 0) for one in every])
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file".ljust(512))


def test_the_labelled_file_of_nyu(tmp_path: Path) -> None:
    path = tmp_path / "nyu_depth_v2_labeled.mat"
    write_nyu_file(path)
    maps = open_depth_maps(path)
    assert list(maps.keys) == [f"{i:04d}" for i in range(1, 7)]
    assert maps.max_depth == 10
    truth = next(miniatures(0, 6)).depths
    np.testing.assert_allclose(
        maps.read(0), np.where(truth > 0, truth, np.nan), rtol=1e-6
    )
    assert maps.where(2) == f"depth map 3 of {path}"


def test_the_images_of_the_labelled_file(tmp_path: Path) -> None:
    path = tmp_path / "nyu_depth_v2_labeled.mat"
    write_nyu_file(path)
    source = open_source(str(path))
    assert list(source.ids) == list(open_depth_maps(path).keys)
    image, value = source.opener.load(2)
    assert (np.asarray(image) == [one.pixels for one in miniatures(0, 6)][2]).all()
    assert source.opener.hash(2) == value
    assert source.opener.size(2) == (72, 96)
    other = tmp_path / "x.mat"
    other.write_bytes(b"MATLAB 5.0")
    with pytest.raises(DataError, match=r"x.mat is no MATLAB file of version 7\.3"):
        open_source(str(other))
    h5py = pytest.importorskip("h5py")
    with h5py.File(other, "w") as file:
        file["images"] = np.zeros((2, 3), np.uint8)
    with pytest.raises(DataError, match=r"has no uint8 'images' of .*found: images"):
        open_source(str(other))


def test_the_labelled_file_equals_png_files(tmp_path: Path) -> None:
    path = tmp_path / "nyu_depth_v2_labeled.mat"
    write_nyu_file(path)
    store, depths = made_depths(tmp_path, 1)
    every = open_depth_maps(path)
    for i in range(6):
        mm = np.nan_to_num(every.read(i)) * 1000
        Image.fromarray(np.rint(mm).astype(np.uint16)).save(depths / f"{i + 1:04d}.png")
    (depths / "a0.png").unlink()
    tokens = np.random.default_rng(0).normal(size=(6, 12, 4)).astype(np.float32)
    store = write_sites(
        tmp_path / "n.zarr", {SITE: (tokens, layout(3, 4))}, sizes=(72, 96),
        ids=[f"{i:04d}.png" for i in range(1, 7)], transform=transform(12, 16),
    )  # fmt: skip
    choice: dict[str, Any] = {"holdout": 0.5, "l2_relative": [0.1]}
    one = run(store, depth=path, **choice)
    other = run(store, depth=depths, depth_scale=1000, max_depth=10, **choice)
    np.testing.assert_allclose(values(one), values(other), rtol=1e-3)


def test_the_layout_of_sync_depth(tmp_path: Path) -> None:
    write_depths(tmp_path, n_images=2)
    maps = open_depth_maps(tmp_path / "nyu")
    assert "test/bedroom_0001/rgb_00000.png" in maps.keys
    assert maps.files.layout.startswith("NYU")
    found = maps.read(list(maps.keys).index("test/bedroom_0001/rgb_00000.png"))
    assert np.isnan(found[0]).all()  # the frame
    assert 1 < np.nanmin(found) < np.nanmax(found) < 8


METRES, MM = "--depth-scale 1000", np.uint16
# What the first map is, words after the store and --holdout, and what is said.
WRONG: list[tuple[Any, str, str]] = [
    (None, "--depth a-depths", "nothing in a-depths says how many units"),
    (Image.new("RGB", (23, 17)), f"--depth a-depths {METRES}",
     "a0.png is an image of mode RGB; expected one channel of 16 bits"),
    (Image.new("L", (23, 17), 7), f"--depth a-depths {METRES}", "a0.png is an image of mode L"),
    *((Image.fromarray(np.full((17, 23), value, MM)), f"--depth a-depths --max-depth 10 {METRES}",
       "a0.png: no pixel has a depth between") for value in (0, 65535)),
    (Image.fromarray(np.full((5, 5), 900, MM)), f"--depth a-depths {METRES}",
     "a0.png is 5 x 5 pixels, its image a0.jpg is 23 x 17"),
    (b"no picture", f"--depth a-depths {METRES}", "a0.png"),
    (None, f"--depth a-depths {METRES} --eigen-crop", "--eigen-crop expects NYU's 640 x 480"),
    (None, "", "give exactly one of --masks and --depth"),
    (None, f"--depth a-depths --masks a-masks {METRES}", "give exactly one of --masks"),
    (None, f"--depth none {METRES}", "no file or folder"),
    (None, f"--depth empty {METRES}", "no .png files below"),
    (None, f"--depth a-depths/a1.png {METRES}", "is no MATLAB file of version 7.3 (HDF5)"),
    *((None, f"--depth a-depths {METRES} {words}", text) for words, text in (
        ("--per-class", "--per-class belongs to --masks"),
        ("--ignore 0", "--ignore belongs to --masks"),
        ("--balanced", "--balanced belongs to classes"),
        ("--solver logistic", "--solver logistic has no --depth; expected ridge or knn or"),
        ("--preset capi", "--preset capi has no --depth"),
        ("--resolution patch", "--resolution patch has no --depth"),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    made_depths(folder, 4)
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(("first", "words", "text"), WRONG)
def test_wrong_depths_are_refused_by_name(
    wrong: Path, first: Any, words: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wrong)
    place = Path("a-depths/a0.png")
    good = place.read_bytes()
    if isinstance(first, bytes):
        place.write_bytes(first)
    elif first is not None:
        first.save(place)
    result = command("a.zarr", "--holdout", 0.5, "-o", "-", *words.split())
    place.write_bytes(good)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert text in flat(result.stderr)


def test_wrong_nyu_files_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.mat"
    with h5py.File(path, "w") as file:
        file["labels"] = np.zeros((2, 3, 4))
    with pytest.raises(VitseeError, match=r"has no floats 'depths'.*found: labels"):
        open_depth_maps(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(VitseeError, match="cannot be read as HDF5"):
        open_depth_maps(path)
    write_nyu_file(path)
    with pytest.raises(VitseeError, match="--depth-scale belongs to PNG files"):
        open_depth_maps(path, 1000.0)


def test_images_without_a_depth_map_are_left_out(tmp_path: Path) -> None:
    store, depths = made_depths(tmp_path, 6)
    (depths / "a3.png").unlink()
    table = run(store, depth=depths, depth_scale=1000, holdout=0.5, l2_relative=[1.0])
    counts = [table.notes["train"], *table.notes["tests"]]
    assert sum(part["left_out_without_mask"] for part in counts) == 1
    for own in depths.glob("*.png"):
        own.unlink()
    Image.fromarray(np.ones((4, 4), np.uint16)).save(depths / "other.png")
    with pytest.raises(VitseeError, match="expected the same names but for the ending"):
        run(store, depth=depths, depth_scale=1000, holdout=0.5)
    bare = write_sites(
        tmp_path / "bare.zarr", {SITE: (np.ones((4, 12, 2), np.float32), layout(3, 4))},
        sizes=(8, 8), ids=["other.jpg", *"bcd"],
    )  # fmt: skip
    with pytest.raises(MissingInput):
        run(bare, depth=depths, depth_scale=1000, holdout=0.5)


@pytest.mark.slow
def test_a_user_s_run(tmp_path: Path) -> None:
    store, depths = made_depths(tmp_path, 8)
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    args = (
        store.path,
        "--depth",
        depths,
        "--depth-scale",
        1000,
        "--holdout",
        0.4,
        "--l2-relative",
        1,
    )
    result = command(*args, "--show", 1, "-o", out, "--png", png)
    assert result.exit_code == 0, result.output
    table = Table.read(out)
    assert set(table["metric"].tolist()) == {"rmse", "abs_rel", "a1"}
    assert set(table["baseline"].tolist()) == {"", "mean", "position"}
    assert png.stat().st_size > 0

"""Dense probes: against explicit pixels, hand-computed values and what a user sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import jaccard_score

from tests.stores import write_sites
from tests.tables import having
from vitsee_cli.main import main
from vitsee_core.analyses.dense_probe import COLUMNS, plot, run
from vitsee_core.analyses.dense_probe.linear import CellSums, PixelSums, Solutions
from vitsee_core.analyses.dense_probe.metrics import (
    Counts,
    accuracy,
    class_cells,
    class_ious,
    count_confusions,
    mean_iou,
    rare_classes,
)
from vitsee_core.analyses.dense_probe.pixels import (
    Pixels,
    labelled_pixels,
)
from vitsee_core.images.placement import Placement
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.png_maps import IGNORED, near_boundary
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
STEP = 4  # pixels of a token
SIZES = [(17, 23), (8, 8), (31, 9), (12, 12)]  # of images, in turn


def layout(
    rows: int, cols: int, step: float = STEP, prefix: Sequence[str] = ()
) -> TokenLayout:
    return TokenLayout(tuple(prefix), (rows, cols), stride_px=(step, step))


def transform(height: int, width: int, mode: str = "squash") -> dict[str, Any]:
    return {
        "input_size": (3, height, width), "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": mode, "mean": (0.5,) * 3, "std": (0.5,) * 3,
    }  # fmt: skip


def class_map(size: tuple[int, int], seed: int, classes: Sequence[int]) -> Array:
    """Blobs of classes and of ignored pixels."""
    rng = np.random.default_rng(seed)
    coarse = rng.choice([*classes, IGNORED], (3, 4)).astype(np.uint8)
    return np.asarray(
        Image.fromarray(coarse).resize(size[::-1], Image.Resampling.NEAREST)
    )


def made(
    folder: Path,
    n: int = 12,
    *,
    grid: tuple[int, int] = (3, 4),
    dim: int = 5,
    mode: str = "squash",
    name: str = "a",
    seed: int = 0,
    sites: Sequence[str] = ("blocks.0.out", "blocks.1.out"),
    classes: Sequence[int] = (0, 1, 2, 4),
    **more: Any,
) -> tuple[Store, Path]:
    """A store of random tokens and a folder of class maps."""
    rng = np.random.default_rng(seed)
    where = layout(*grid)
    sizes = [SIZES[i % len(SIZES)] for i in range(n)]
    masks = folder / f"{name}-masks"
    masks.mkdir(parents=True)
    for i, size in enumerate(sizes):
        Image.fromarray(class_map(size, 100 * seed + i, classes)).save(
            masks / f"{name}{i}.png"
        )
    tokens: dict[str, Any] = {
        site: (np.float32(rng.normal(3, 1 + k, (n, grid[0] * grid[1], dim))), where)
        for k, site in enumerate(sites)
    }
    size = grid[0] * STEP, grid[1] * STEP
    store = write_sites(
        folder / f"{name}.zarr", tokens, slab=5, sizes=sizes,
        ids=[f"{name}{i}.jpg" for i in range(n)], transform=transform(*size, mode),
        hash_offset=1000 * seed, **more,
    )  # fmt: skip
    return store, masks


# ---------------------------------------------------------------- oracles: pixels in memory


def upsampled(tokens: Array, size: tuple[int, int]) -> Array:
    """(pixels, dim) by torch, of tokens (rows, cols, dim) that cover the image."""
    maps = torch.from_numpy(np.asarray(tokens, np.float64)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(
        maps, size, mode="bilinear", align_corners=False
    )
    return np.asarray(found[0].permute(1, 2, 0).reshape(-1, tokens.shape[-1]))


def explicit_ridge(x: Array, labels: Array, l2: float) -> tuple[Array, Array, Array]:
    """Classes, weights and bias of ridge on all pixels, as an augmented least-squares problem."""
    classes = np.unique(labels)
    y = (labels[:, None] == classes).astype(float)
    centred = x - x.mean(0)
    unit = l2 * len(x) * centred.var(0).mean()
    rows = np.concatenate([centred, np.sqrt(unit) * np.eye(x.shape[1])])
    aim = np.concatenate([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))])
    weights = np.linalg.lstsq(rows, aim, rcond=None)[0]
    return classes, weights, y.mean(0) - x.mean(0) @ weights


def every_pixel(
    store: Store, site: str, masks: Path, rows: Sequence[int]
) -> tuple[Array, Array]:
    """Features and labels of all labelled pixels of squashed images."""
    xs, ys = [], []
    for row in rows:
        labels = np.asarray(
            Image.open(masks / store.samples.id[row].replace("jpg", "png"))
        )
        x = upsampled(store.acts(site, "patches")[row : row + 1][0], labels.shape)
        keep = labels.ravel() != IGNORED
        xs.append(x[keep])
        ys.append(labels.ravel()[keep])
    return np.concatenate(xs), np.concatenate(ys)


def summed(
    store: Store,
    masks: Path,
    rows: Sequence[int],
    grid: tuple[int, int],
    shift: float = 0,
) -> PixelSums:
    """Sums over the pixels of squashed images at the first site."""
    sums, size = PixelSums.empty(5), (STEP * grid[0], STEP * grid[1])
    for row in rows:
        labels = np.asarray(Image.open(masks / f"a{row}.png"))
        pixels = labelled_pixels(
            labels, Placement(0, 0, *size), layout(*grid), size, "label"
        )
        tokens = store.acts("blocks.0.out", "patches")[row : row + 1][0].astype(
            np.float64
        )
        sums.count(tokens - shift, CellSums.of(pixels))
    return sums


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (1, 1), (6, 2)])
def test_weights_equal_those_of_explicit_pixels(
    tmp_path: Path, grid: tuple[int, int]
) -> None:
    store, masks = made(tmp_path, 8, grid=grid)
    x, labels = every_pixel(store, "blocks.0.out", masks, range(8))
    sums = summed(store, masks, range(8), grid, shift=2.5)
    assert sums.n == len(labels)
    solutions = Solutions.of(sums)
    for l2 in (1e-6, 1e-2, 10.0):
        classes, weights, bias = explicit_ridge(x, labels, l2)
        scores = solutions.scores(l2, np.full(5, 2.5))
        assert solutions.classes.tolist() == classes.tolist()
        np.testing.assert_allclose(scores.weights, weights, rtol=0, atol=1e-9)
        np.testing.assert_allclose(scores.bias, bias, rtol=0, atol=1e-9)


def test_held_out_errors_equal_those_of_explicit_pixels(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 8, classes=(0, 1, 2))
    l2s, parts = (1e-4, 1e-1, 1.0), (range(0, 5), range(5, 8))
    fitted, held = (summed(store, masks, rows, (3, 4)) for rows in parts)
    (x, labels), (other, truth) = (
        every_pixel(store, "blocks.0.out", masks, rows) for rows in parts
    )
    found = Solutions.of(fitted).squared_errors(l2s, held)
    for l2, value in zip(l2s, found, strict=True):
        classes, weights, bias = explicit_ridge(x, labels, l2)
        off = other @ weights + bias - (truth[:, None] == classes)
        assert value == pytest.approx((off**2).sum() / len(truth), rel=1e-9)


def test_the_table_equals_that_of_explicit_pixels(tmp_path: Path) -> None:
    """Training, prediction and counts, of images of odd sizes, by another way throughout."""
    train, masks = made(tmp_path, 9)
    test, others = made(tmp_path, 7, name="b", seed=1)
    table = run(train, test, masks=[masks, others], l2_relative=[0.01], per_class=True)
    assert tuple(table.written.columns) == COLUMNS
    for site in ("blocks.0.out", "blocks.1.out"):
        classes, weights, bias = explicit_ridge(
            *every_pixel(train, site, masks, range(9)), 0.01
        )
        x, truth = every_pixel(test, site, others, range(7))
        predicted = classes[(x @ weights + bias).argmax(1)]
        own = having(table, site=site, baseline="")
        present = np.union1d(truth, predicted)
        each = jaccard_score(truth, predicted, labels=present, average=None)
        assert own.filter(metric="miou")["value"] == pytest.approx(each.mean(), abs=1e-12)
        right = (truth == predicted).mean()
        assert own.filter(metric="pixel_accuracy")["value"] == pytest.approx(
            right, abs=1e-12
        )
        by_class = own.filter(metric="iou_class")
        assert by_class["class"].tolist() == [str(number) for number in present]
        assert by_class["value"] == pytest.approx(each, abs=1e-12)
    assert set(table["n_images"].tolist()) == {7}


@pytest.mark.slow
def test_jackknife_leaves_out_blocks_of_images(tmp_path: Path) -> None:
    train, masks = made(tmp_path, 6)
    test, others = made(tmp_path, 6, name="b", seed=1)
    table = run(
        train,
        test,
        masks=[masks, others],
        l2_relative=[0.01],
        sites=["last"],
        metrics=["miou"],
    )
    without = []
    for row in range(6):
        only = [name for i, name in enumerate(test.samples.id.tolist()) if i != row]
        folder = tmp_path / f"without{row}"
        folder.mkdir()
        for name in only:
            picture = name.replace("jpg", "png")
            (folder / picture).write_bytes((others / picture).read_bytes())
        part = run(
            train,
            test,
            masks=[masks, folder],
            l2_relative=[0.01],
            sites=["last"],
            metrics=["miou"],
        )
        without.append(having(part, baseline="")["value"][0])
    assert table.replicates is not None
    np.testing.assert_allclose(table.replicates[0], without, atol=1e-12)


# ---------------------------------------------------------------- by hand


def test_a_probe_of_separable_tokens_is_perfect(tmp_path: Path) -> None:
    """Classes are halves of images and tokens say which: nearest to the middle the halves meet
    where the interpolation crosses."""
    masks = tmp_path / "masks"
    masks.mkdir()
    tokens = np.zeros((4, 2, 1), np.float32)
    for i in range(4):
        flipped = i % 2
        labels = np.repeat([[flipped, 1 - flipped]], 2, axis=0).repeat(4, 0).repeat(4, 1)
        Image.fromarray(labels.astype(np.uint8)).save(masks / f"{i}.png")
        tokens[i, flipped] = 1
    where = layout(1, 2, 8)
    store = write_sites(
        tmp_path / "a.zarr", {"blocks.0.out": (tokens, where)}, ids=[f"{i}.png" for i in range(4)],
        sizes=(8, 8), transform=transform(8, 16),
    )  # fmt: skip
    table = run(store, masks=masks, holdout=0.5, l2_relative=[1e-9])
    assert having(table, baseline="", metric="miou")["value"].tolist() == [1]
    assert having(table, baseline="", metric="boundary_iou")["value"].tolist() == [1]
    # of either class half of the pixels: chance by the lower class, and by the place
    half = table.filter(baseline="majority", metric="pixel_accuracy")["value"]
    assert half.tolist() == [0.5]


def test_counts_and_ious_by_hand() -> None:
    labels = np.array([[0, 0, 1, IGNORED]], np.uint8)
    found = np.array([[0, 1, 1, IGNORED]], np.uint8)
    counts = count_confusions(found, labels)
    assert counts[:, :3].tolist() == [[1, 1, 0], [1, 2, 0], [2, 1, 0]]
    ious = class_ious(counts)
    assert ious[:2].tolist() == [0.5, 0.5]
    assert np.isnan(ious[2:]).all()
    assert mean_iou(counts) == 0.5
    assert accuracy(counts) == pytest.approx(2 / 3)
    assert np.isnan(mean_iou(np.zeros((3, IGNORED), int)))


def test_boundaries_equal_erosion_by_a_loop() -> None:
    rng = np.random.default_rng(0)
    labels = np.kron(rng.integers(0, 3, (4, 5)), np.ones((9, 11))).astype(np.uint8)
    reach = max(1, round(0.02 * float(np.hypot(*labels.shape))))
    expected = np.zeros(labels.shape, bool)
    for r, c in np.ndindex(labels.shape):
        rows, cols = (range(at - reach, at + reach + 1) for at in (r, c))
        inside = rows[0] >= 0 and cols[0] >= 0
        inside &= rows[-1] < labels.shape[0] and cols[-1] < labels.shape[1]
        near = labels[
            max(r - reach, 0) : r + reach + 1, max(c - reach, 0) : c + reach + 1
        ]
        expected[r, c] = not inside or bool((near != labels[r, c]).any())
    assert (near_boundary(labels) == expected).all()


# ---------------------------------------------------------------- pixels


def test_what_was_cropped_has_no_class() -> None:
    """A wide image of which the model saw the middle square."""
    labels = np.arange(16, dtype=np.uint8)[None].repeat(8, 0)
    pixels = labelled_pixels(
        labels, Placement(0, -4, 8, 12), layout(2, 2), (8, 8), "label"
    )
    assert (pixels.labels[0] == [*[IGNORED] * 4, *range(4, 12), *[IGNORED] * 4]).all()
    # pixel 6 has its middle on that of the first cell but half a pixel
    assert pixels.col_weights[6].tolist() == [0.875, 0.125]
    seen = labelled_pixels(labels, Placement(0, -4, 8, 12), layout(2, 2), (8, 8), "input")
    assert (seen.labels == np.arange(4, 12)).all()


def test_cells_beside_the_image_have_no_part() -> None:
    labels = np.zeros((8, 8), np.uint8)
    for resolution in ("label", "input"):
        pixels = labelled_pixels(
            labels, Placement(0, 0, 8, 8), layout(2, 4), (8, 16), resolution
        )
        assert not pixels.col_weights[:, 2:].any()
        counted_columns = (pixels.labels != IGNORED).all(0)
        assert counted_columns.tolist() == [True] * 8 + [False] * (
            len(counted_columns) - 8
        )
    cells = labelled_pixels(labels, Placement(0, 0, 8, 8), layout(2, 4), (8, 16), "patch")
    assert cells.labels.tolist() == [[0, 0, IGNORED, IGNORED]] * 2


def test_patches_have_their_most_frequent_class() -> None:
    labels = np.array([[0, 1, 1, IGNORED], [1, 2, IGNORED, IGNORED]], np.uint8)
    pixels = labelled_pixels(
        labels, Placement(0, 0, 2, 4), layout(1, 2, 2), (2, 4), "patch"
    )
    assert pixels.labels.tolist() == [[1, IGNORED]]


def test_the_map_on_the_input_is_pillow_s_nearest() -> None:
    rng = np.random.default_rng(0)
    for size in ((5, 7), (24, 30), (13, 16), (8, 8)):
        labels = rng.integers(0, 9, size).astype(np.uint8)
        seen = labelled_pixels(
            labels, Placement(0, 0, 12, 16), layout(3, 4), (12, 16), "input"
        )
        expected = Image.fromarray(labels).resize((16, 12), Image.Resampling.NEAREST)
        assert (seen.labels == np.asarray(expected)).all()


def test_sums_of_an_image_without_a_class_are_zero() -> None:
    at = np.arange(4.0), np.arange(6.0)
    nothing = Pixels(
        np.full((4, 6), IGNORED, np.uint8), np.ones((4, 1)), np.ones((6, 1)), at
    )
    sums = CellSums.of(nothing)
    assert sums.present == []
    assert sums.targets.shape == (0, 1, 1)
    assert not sums.smoothed(np.ones((1, 1, 3))).any()
    pixels = PixelSums.empty(3)
    pixels.count(np.ones((1, 1, 3)), sums)
    assert pixels.n == 0


# ---------------------------------------------------------------- invariances and edge cases


def test_scale_and_order_do_not_matter(tmp_path: Path) -> None:
    """Features in other units, or with a large mean, give the same predictions; so does any number
    of threads, to the bit."""
    store, masks = made(tmp_path, 10)
    values = np.asarray(store.acts("blocks.0.out", "patches")[:], np.float32)
    other = write_sites(
        tmp_path / "b.zarr", {"blocks.0.out": (64 * values.reshape(10, 12, 5) + 512, layout(3, 4))},
        slab=5, sizes=store.sizes, ids=store.samples.id.tolist(), transform=transform(12, 16),
    )  # fmt: skip
    choice: dict[str, Any] = {"masks": masks, "holdout": 0.4, "sites": ["blocks.0.out"]}
    table = run(store, **choice)
    np.testing.assert_allclose(run(other, **choice)["value"], table["value"], atol=1e-12)
    again = run(store, **choice, jobs=3)
    assert again["value"].tolist() == table["value"].tolist()


def test_masks_of_0_and_255_are_two_classes_without_void(tmp_path: Path) -> None:
    """Of the same scores as masks of 0 and 1, whichever values stand for the classes."""
    store, masks = made(tmp_path, 6, classes=(0, 1))
    binary = tmp_path / "binary"
    binary.mkdir()
    for path in masks.glob("*.png"):
        is_object = np.asarray(Image.open(path)) == 1
        Image.fromarray(np.uint8(is_object)).save(path)
        Image.fromarray(255 * np.uint8(is_object)).save(binary / path.name)
    expected = run(store, masks=masks, holdout=0.5, per_class=True)
    table = run(store, masks=binary, holdout=0.5, per_class=True, void="none")
    np.testing.assert_allclose(table["value"], expected["value"], atol=1e-12)
    assert set(expected["class"]) == {"", "0", "1"}
    assert set(table["class"]) == {"", "0", "255"}
    with pytest.raises(VitseeError, match="--void none makes them a class"):
        run(store, masks=binary, holdout=0.5)


def test_one_class_and_constant_tokens(tmp_path: Path) -> None:
    """One class is no task, in which everything would score 1; constant tokens know what is most
    frequent."""
    store, masks = made(tmp_path, 6, classes=(7,))
    with pytest.raises(
        VitseeError, match="are of the class 7; expected two classes at least"
    ):
        run(store, masks=masks, holdout=0.5, metrics=["miou", "pixel_accuracy"])
    flat_store = write_sites(
        tmp_path / "flat.zarr", {"blocks.0.out": (np.ones((6, 12, 2), np.float32), layout(3, 4))},
        sizes=store.sizes, ids=store.samples.id.tolist(), transform=transform(12, 16),
    )  # fmt: skip
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for i, size in enumerate(store.sizes.tolist()):
        Image.fromarray(class_map(tuple(size), i, (1, 2))).save(mixed / f"a{i}.png")
    found = run(flat_store, masks=mixed, holdout=0.5, metrics=["pixel_accuracy"])
    real, blind = (having(found, baseline=name)["value"] for name in ("", "majority"))
    assert real.tolist() == blind.tolist()


def test_a_class_that_did_not_train_scores_zero(tmp_path: Path) -> None:
    train, masks = made(tmp_path, 5, classes=(0, 1))
    test, others = made(tmp_path, 5, name="b", seed=1, classes=(0, 1, 9))
    table = run(train, test, masks=[masks, others], per_class=True)
    row = having(table, metric="iou_class", baseline="", site="blocks.0.out")
    assert dict(zip(row["class"].tolist(), row["value"].tolist(), strict=True))["9"] == 0


def test_untrained_stores_are_a_baseline(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 8)
    other, _ = made(tmp_path / "more", 8, seed=3)
    choice: dict[str, Any] = {"masks": masks, "holdout": 0.5, "l2_relative": [0.1]}
    table = run(store, untrained=[other.path], **choice)
    alone = having(run(other, **choice), baseline="")
    control = table.filter(baseline="untrained")
    assert control["value"].tolist() == alone["value"].tolist()
    assert set(control["store"].tolist()) == {"a"}
    with pytest.raises(VitseeError, match=r"--untrained was given 2 times; expected 1"):
        run(store, untrained=[other.path] * 2, **choice)


def test_the_chosen_l2_is_that_of_held_out_images(tmp_path: Path) -> None:
    """Random tokens know nothing: the largest l2 errs least."""
    store, masks = made(tmp_path, 40)
    table = run(store, masks=masks, holdout=0.3, sites=["first"], metrics=["miou"])
    assert having(table, baseline="")["l2_relative"].tolist() == [100.0]
    assert table.notes["train"]["held_out_images"] == 3
    several = run(
        store,
        masks=masks,
        holdout=0.3,
        sites=["first"],
        metrics=["miou"],
        l2_relative=[0.1, 1.0],
    )
    assert having(several, baseline="")["l2_relative"].tolist() == [0.1, 1.0]


def test_figures(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 8)
    for more in ({"l2_relative": [0.1, 1.0]}, {"show": 2}):
        table = run(store, masks=masks, holdout=0.5, metrics=["miou"], **more)
        figure = plot(Table(table.written, json.loads(json.dumps(table.notes))))
        pictures = [axes for axes in figure.axes if axes.images]
        assert len(pictures) == (6 if "show" in more else 0)  # no photographs: no data
        assert all(axes.yaxis_inverted() for axes in pictures), (
            "the first row is at the top"
        )


def command(*args: object) -> Result:
    return CliRunner().invoke(main, ["dense-probe", *map(str, args)])


@pytest.mark.slow
def test_a_user_s_run(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 8, splits=["train"] * 5 + ["val"] * 3)
    (tmp_path / "val.txt").write_text("a5\na6\na7\n")
    png = tmp_path / "r.png"
    same = (
        "--masks",
        masks,
        "--ignore",
        "0",
        "--resolution",
        "input",
        "--metric",
        "miou",
    )
    tables = []
    for split, more in (("val", ("--png", png)), (tmp_path / "val.txt", ("--force",))):
        out = ("-o", tmp_path / "r.csv", *more)
        result = command(store.path, *same, "--split", split, *out)
        assert result.exit_code == 0, result.output
        tables.append(Table.read(tmp_path / "r.csv"))
    table = tables[0]
    assert set(table["n_images"].tolist()) == {3}
    assert table.notes["truth"]["ignored values"] == "0, 255"
    assert table.notes["train"]["with_mask"] == 5
    assert png.stat().st_size > 0
    assert tables[1]["value"].tolist() == table["value"].tolist()


N_COMMON = 3
N_RARE = 27


def counts_of_images(
    rng: np.random.Generator, n: int, absent_share: float
) -> NDArray[np.int64]:
    """Return pixels of n images, (n, 3, classes), as `Counts` has them; 400 pixels an image.

    3 classes are in 90 % of images, 27 in 5 %; of their pixels 60 and 40 % are right.

    absent_share: the share of wrong pixels that go to any class, others to classes of the image.
    """
    n_classes = N_COMMON + N_RARE
    occurrence = np.repeat([0.9, 0.05], [N_COMMON, N_RARE])
    accuracy = np.repeat([0.6, 0.4], [N_COMMON, N_RARE])
    counts = np.zeros((n, 3, IGNORED), np.int64)
    for image in counts:
        is_there = rng.random(n_classes) < occurrence
        is_there[0] |= not is_there.any()
        weights = is_there * rng.gamma(2.0, 1.0, n_classes)
        weights /= weights.sum()
        labelled = rng.multinomial(400, weights)
        right = rng.binomial(labelled, accuracy)
        n_wrong = int((labelled - right).sum())
        n_anywhere = int(rng.binomial(n_wrong, absent_share))
        predicted = right + rng.multinomial(n_anywhere, np.full(n_classes, 1 / n_classes))
        predicted += rng.multinomial(n_wrong - n_anywhere, weights)
        image[:, :n_classes] = right, predicted, labelled
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent_share", "least", "most"), [(0.0, 0.8, 1.0), (0.2, 0.1, 0.4)]
)
def test_intervals_of_rare_classes_miss_the_mean_of_many_images(
    absent_share: float, least: float, most: float
) -> None:
    """The remark's numbers: with 20 images, 23 % of the intervals cover the value of many images
    if absent classes are predicted, and 91 % if they are not (100 samples: +-10 %)."""
    rng = np.random.default_rng(0)
    many = mean_iou(counts_of_images(rng, 5000, absent_share).sum(0))
    n_covering = 0
    for _ in range(100):
        counts = Counts.empty(20, boundary=False)
        counts.pixels[:] = counts_of_images(rng, 20, absent_share)
        assert rare_classes(counts)
        (cells,) = class_cells(counts, ["miou"])
        low = cells["low"]
        high = cells["high"]
        assert isinstance(low, float) and isinstance(high, float)
        n_covering += int(low <= many <= high)
    assert least <= n_covering / 100 <= most


def test_rare_classes_are_a_remark() -> None:
    """Class 0 in all of 20 blocks, class 1 in five, class 2 in four, class 3 in none."""
    counts = Counts.empty(20, boundary=False)
    for block in range(20):
        labels = np.zeros((4, 4), np.uint8)
        labels[0] = 1 if block < 5 else 0
        labels[1] = 2 if block >= 16 else 0
        counts.pixels[block] += count_confusions(labels, labels)
    (remark,) = rare_classes(counts)
    assert remark.startswith(
        "1 of 3 classes are labelled in fewer than 5 of the 20 blocks"
    )
    common = Counts(counts.pixels[:4], counts.boundary)
    assert len(rare_classes(common)) == 1  # four blocks are fewer than five
    counts.pixels[:, :, 2] = 0
    assert rare_classes(counts) == []

"""Labels carried through frames, and their way from pixels to tokens and back, against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.reference_davis import pixels_of, propagated
from vitsee_core.analyses.propagate import propagation
from vitsee_core.analyses.propagate.propagation import (
    Enlarger,
    FrameMap,
    Propagation,
    Window,
    frame_map,
)
from vitsee_core.analyses.propagate.propagation_settings import (
    PropagationSettings,
    choose_settings,
)
from vitsee_core.images.placement import Placement, nearest_places
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
CPU = torch.device("cpu")
INF = float("inf")


def carried(
    tokens: Array, seeds: Array, settings: PropagationSettings, radii: Any = ...
) -> list[Array]:
    """Soft labels of every frame; tokens (frames, rows, cols, dim), seeds (rows, cols, classes)."""
    grid = tokens.shape[1], tokens.shape[2]
    window = Window(
        grid, settings, settings.radii((1, 1)) if radii is ... else radii, CPU
    )
    run = Propagation(window, tokens.shape[-1], seeds.shape[-1])
    run.start(
        window.order_tokens(tokens[0]), window.order_labels(seeds.astype(np.float32))
    )
    found = [window.maps_of(run.step(window.order_tokens(x))).clone() for x in tokens[1:]]
    return [seeds, *(x.permute(1, 2, 0).numpy() for x in found)]


def clip(
    n_frames: int, grid: tuple[int, int], dim: int = 6, seed: int = 0
) -> tuple[Array, Array]:
    """Random tokens, and soft seeds of three classes."""
    rng = np.random.default_rng(seed)
    seeds = rng.random((*grid, 3))
    return rng.normal(size=(n_frames, *grid, dim)), seeds / seeds.sum(-1, keepdims=True)


# ------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ((4, 7), PropagationSettings(radius=2)),
        ((7, 4), PropagationSettings(radius=2, context=2)),
        (
            (4, 7),
            PropagationSettings(radius=2.9, neighbourhood="circle", temperature=0.2),
        ),
        ((5, 5), PropagationSettings(radius=1, context=0)),
        ((3, 9), PropagationSettings(radius=None, topk=8, context=3)),
        ((3, 9), PropagationSettings(radius=0, topk=3)),  # fewer tokens than are taken
        ((1, 6), PropagationSettings(radius=1, topk=1, temperature=0.01)),
        ((4, 5), PropagationSettings(radius=30, topk=500)),
    ],
)
def test_labels_are_those_of_a_loop(
    grid: tuple[int, int], settings: PropagationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, seeds = clip(11, grid)
    expected = propagated(
        tokens, seeds, context=settings.context, radii=settings.radii((1, 1)), top=settings.topk,
        circle=settings.neighbourhood == "circle", temperature=settings.temperature,
    )  # fmt: skip
    for n_queries in (1, 10, 192):  # strips of one line, of some, of all
        monkeypatch.setattr(propagation, "CPU_QUERIES", n_queries)
        found = carried(tokens, seeds, settings)
        # weights are exp(cos / T) in float32: an error of 1e-7 in cos is 1e-6 to 1e-5 in them
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def test_a_window_in_pixels_has_two_radii() -> None:
    settings = choose_settings(None, radius_px=8.0)
    assert settings.radii((4, 8)) == (2, 1)
    for grid in ((4, 7), (7, 4)):
        tokens, seeds = clip(5, grid)
        expected = propagated(tokens, seeds, radii=(2, 1))
        np.testing.assert_allclose(
            carried(tokens, seeds, settings, (2, 1)), expected, atol=5e-5
        )


def test_by_hand() -> None:
    # one row of three tokens, all seen: cosines of the first with them 1, 0, -1
    frame = np.array([[[1.0, 0], [0, 1], [-1, 0]]])
    seeds = np.eye(3)[None]
    found = carried(np.stack([frame, frame]), seeds, PropagationSettings(topk=2))[1]
    near = 1 / (1 + np.exp(-10))
    np.testing.assert_allclose(found[0, 0], [near, 1 - near, 0], atol=1e-6)
    # the middle one is as near to both: three are kept
    even = np.exp(-10) / (1 + 2 * np.exp(-10))
    np.testing.assert_allclose(found[0, 1], [even, 1 - 2 * even, even], atol=1e-6)


def test_ties_are_all_kept() -> None:
    """Equal tokens: the mean label of the whole window, of all frames."""
    _, seeds = clip(1, (4, 6))
    found = carried(np.ones((3, 4, 6, 2)), seeds, PropagationSettings(radius=1))
    expected = propagated(np.ones((3, 4, 6, 2)), seeds, radii=(1, 1))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found[1][0, 0], seeds[:2, :2].mean((0, 1)), atol=1e-6)


def test_no_temperature_is_too_small() -> None:
    """exp(1 / T) alone overflows below 0.0113; the nearest token's label is what is left."""
    tokens, seeds = clip(2, (3, 4))
    found = carried(tokens, seeds, PropagationSettings(topk=1))
    small = carried(tokens, seeds, PropagationSettings(temperature=1e-4, topk=5))
    np.testing.assert_allclose(small, found, atol=1e-6)


def test_context_zero_looks_at_the_first_frame_alone() -> None:
    tokens, seeds = clip(4, (3, 5))
    alone = carried(tokens[[0, 3]], seeds, PropagationSettings())
    np.testing.assert_array_equal(
        carried(tokens, seeds, PropagationSettings(context=0))[3], alone[1]
    )


def test_scale_and_rotation_of_tokens_do_not_count() -> None:
    tokens, seeds = clip(5, (4, 6))
    found = carried(tokens, seeds, PropagationSettings(radius=2))
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    for other in (tokens * 7.5, tokens @ turn):
        np.testing.assert_allclose(
            carried(other, seeds, PropagationSettings(radius=2)), found, atol=5e-5
        )


def test_classes_may_be_numbered_otherwise() -> None:
    tokens, seeds = clip(5, (4, 6))
    found = carried(tokens, seeds, PropagationSettings())
    swapped = carried(tokens, seeds[..., [0, 2, 1]], PropagationSettings())
    np.testing.assert_allclose(np.array(swapped)[..., [0, 2, 1]], found, atol=1e-6)


def test_a_static_video_stays_as_it_is() -> None:
    """One-hot tokens of colours that are at least as many as are taken."""
    colours = (
        np.random.default_rng(0).permutation(np.repeat(np.arange(4), 6)).reshape(4, 6)
    )
    tokens = np.stack([np.eye(4)[colours]] * 6)
    seeds = np.eye(2)[(colours == 1).astype(int)]
    for labels in carried(tokens, seeds, PropagationSettings()):
        np.testing.assert_allclose(labels, seeds, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------- frames and grids


def covering(size: tuple[int, int], grid: tuple[int, int], cell: int) -> FrameMap:
    """A frame that was squashed to the input."""
    layout = TokenLayout((), grid, stride_px=(cell, cell))
    return frame_map("s", layout, Placement(0, 0, cell * grid[0], cell * grid[1]), size)


@pytest.mark.parametrize("n", [1, 5, 64, 480, 854])
@pytest.mark.parametrize("m", [1, 3, 28, 49, 56, 480])
def test_nearest_is_pillows(n: int, m: int) -> None:
    line = np.random.default_rng(0).permutation(n).astype(np.int32)[None]
    resized = Image.fromarray(line).resize((m, 1), Image.Resampling.NEAREST)
    places = nearest_places(n, m, 0, n)
    np.testing.assert_array_equal(line[0, places], np.asarray(resized)[0])


@pytest.mark.parametrize(
    ("size", "grid", "cell"),
    [((48, 80), (6, 10), 8), ((37, 53), (4, 5), 7), ((480, 854), (28, 49), 16)],
)
def test_seeds_and_pixels_are_those_of_the_released_code(
    size: tuple[int, int], grid: tuple[int, int], cell: int
) -> None:
    rng = np.random.default_rng(3)
    small = Image.fromarray(rng.integers(0, 3, (7, 9)).astype(np.uint8))
    labels = np.asarray(small.resize((size[1], size[0]), Image.Resampling.NEAREST))
    where = covering(size, grid, cell)
    assert where.grid == grid
    assert where.unseen_share() == 0
    down = Image.fromarray(labels).resize((grid[1], grid[0]), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(
        where.seeds(labels, 3, "nearest").argmax(-1), np.asarray(down)
    )
    for soft in (where.seeds(labels, 3, "nearest"), rng.random((*grid, 3))):
        maps = torch.from_numpy(soft.astype(np.float32)).permute(2, 0, 1)
        found = Enlarger(where, "bilinear", CPU)(maps)
        np.testing.assert_array_equal(found, pixels_of(soft, cell, size))


def test_many_classes_are_enlarged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    where = covering((24, 32), (3, 4), 8)
    soft = np.random.default_rng(4).random((3, 4, 9))
    soft[..., 7] = soft[..., 2]  # equal everywhere: the first wins
    maps = torch.from_numpy(soft.astype(np.float32)).permute(2, 0, 1)
    whole = Enlarger(where, "bilinear", CPU)(maps)
    np.testing.assert_array_equal(whole, pixels_of(soft, 8, (24, 32)))
    assert 7 not in whole
    monkeypatch.setattr(propagation, "UPSAMPLED_BYTES", 1)
    np.testing.assert_array_equal(Enlarger(where, "bilinear", CPU)(maps), whole)


def test_classes_that_are_the_same_everywhere() -> None:
    """The released code divides 0 by 0 there, and NaN is the largest: such a class wins."""
    where = covering((8, 8), (2, 2), 4)
    varying = np.array([[0.2, 0.4], [0.1, 0.3]])
    for maps, expected in (
        ([np.ones((2, 2)), np.zeros((2, 2))], 0),  # all objects lost
        ([varying, np.full((2, 2), 0.5)], 1),
        ([np.full((2, 2), 0.5), varying], 0),
        ([np.zeros((2, 2)), np.zeros((2, 2))], 0),
    ):
        soft = np.stack(maps, -1)
        found = Enlarger(where, "bilinear", CPU)(torch.from_numpy(np.stack(maps)).float())
        assert (found == expected).all()
        np.testing.assert_array_equal(found, pixels_of(soft, 4, (8, 8)))


def test_nearest_takes_the_cell_of_a_pixel() -> None:
    where = covering((6, 6), (2, 3), 8)
    maps = torch.zeros((7, 2, 3))
    for i in range(6):
        maps[i + 1, i // 3, i % 3] = 1
    expected = np.repeat(np.repeat([[1, 2, 3], [4, 5, 6]], 3, 0), 2, 1)
    np.testing.assert_array_equal(Enlarger(where, "nearest", CPU)(maps), expected)


def test_shares_of_area() -> None:
    labels = np.zeros((4, 5), np.uint8)
    labels[:2, :2] = 1
    labels[3, 4] = 2
    # two columns of 2.5 pixels, two rows of two
    found = covering((4, 5), (2, 2), 8).seeds(labels, 3, "area")
    np.testing.assert_allclose(found[0, 0], [0.2, 0.8, 0], atol=1e-7)
    np.testing.assert_allclose(found[0, 1], [1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(found[1, 1], [0.8, 0, 0.2], atol=1e-7)
    fine = np.repeat(np.repeat(labels, 6, 0), 6, 1)  # 24 x 30 pixels in cells of 12 x 15
    means = np.stack(
        [(fine == i).reshape(2, 12, 2, 15).mean((1, 3)) for i in range(3)], -1
    )
    np.testing.assert_allclose(found, means, atol=1e-7)


def test_a_cropped_frame() -> None:
    """A frame of 40 x 80 whose middle 40 x 40 the model sees, 10 pixels a cell."""
    layout = TokenLayout((), (4, 4), stride_px=(10, 10))
    where = frame_map("s", layout, Placement(0, -20, 40, 60), (40, 80))
    assert where.grid == (4, 4)
    assert where.unseen_share() == pytest.approx(0.5)
    labels = np.ones((40, 80), np.uint8)
    labels[:, 30:] = 2
    seeds = where.seeds(labels, 3, "nearest").argmax(-1)
    assert seeds[0].tolist() == [1, 2, 2, 2]
    found = Enlarger(where, "nearest", CPU)(torch.eye(3)[seeds].permute(2, 0, 1))
    assert np.unique(found[:, :20]).tolist() == np.unique(found[:, 60:]).tolist() == [0]
    np.testing.assert_array_equal(found[:, 20:60], labels[:, 20:60])


def test_a_frame_in_a_corner_of_the_input() -> None:
    """A frame of 32 x 52 at its own size in the corner of 40 x 80: cells of 10, and of 20 that lie
    on it by a little more than half."""
    place = Placement(0, 0, 32, 52)
    where = frame_map("s", TokenLayout((), (4, 8), stride_px=(10, 10)), place, (32, 52))
    assert where.grid == (3, 5)  # the middle of the next row and column is beyond it
    tokens = np.arange(32.0).reshape(4, 8, 1)
    assert where.cells(tokens)[..., 0].tolist() == tokens[:3, :5, 0].tolist()
    coarse = frame_map("s", TokenLayout((), (2, 4), stride_px=(20, 20)), place, (32, 52))
    assert coarse.grid == (2, 3)
    labels = np.zeros((32, 52), np.uint8)
    labels[20:, 40:] = 1
    for how in ("nearest", "area"):
        seeds = coarse.seeds(labels, 2, how)
        assert seeds[1, 2].tolist() == [0, 1]  # of what lies on the frame
        assert seeds[..., 1].sum() == 1
    found = Enlarger(coarse, "nearest", CPU)(torch.from_numpy(seeds).permute(2, 0, 1))
    np.testing.assert_array_equal(found, labels)


def test_pixels_of_cells_that_were_left_out() -> None:
    """A frame of 32 x 52 in the corner: its last two rows and columns lie in cells whose middle is
    beyond it, and take their neighbour's class."""
    place = Placement(0, 0, 32, 52)
    where = frame_map("s", TokenLayout((), (4, 8), stride_px=(10, 10)), place, (32, 52))
    assert where.unseen_share() == 0
    maps = torch.zeros((2, 3, 5))
    maps[0] = 1
    maps[:, 2, 4] = torch.tensor([0.0, 1.0])
    found = Enlarger(where, "nearest", CPU)(maps)
    assert (found[20:, 40:] == 1).all()
    assert found.sum() == 12 * 12


def test_a_grid_beside_the_frame() -> None:
    layout = TokenLayout((), (1, 1), stride_px=(10, 10))
    with pytest.raises(VitseeError, match="no token of s lies on frames of 4 x 4 pixels"):
        frame_map("s", layout, Placement(20, 20, 24, 24), (4, 4))
    for other in (None, TokenLayout((), None, 3), TokenLayout((), (2, 2))):
        with pytest.raises(SiteError, match="s has no grid of tokens"):
            frame_map("s", other, Placement(0, 0, 4, 4), (4, 4))


# ------------------------------------------------------------------------------------ settings


def test_settings_of_presets() -> None:
    assert choose_settings(None) == choose_settings("walmer") == choose_settings("dino")
    third = choose_settings("dinov3", topk=3)
    assert third == PropagationSettings(
        7, 12, None, "circle", 3, 0.2, "nearest", "nearest"
    )
    assert choose_settings(None, radius=INF).radii((16, 16)) is None
    assert choose_settings(None, radius_px=192.0).radii((16, 16)) == (12, 12)
    assert choose_settings(None, radius=1.0, context=1).max_window_tokens((16, 16)) == 18


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            {"neighbourhood": "hexagon"},
            "no neighbourhood 'hexagon'; expected square or circle",
        ),
        ({"context": -1}, "context is -1; expected at least 0"),
        ({"topk": 0}, "topk is 0; expected at least 1"),
        ({"radius": -2.0}, "the radius is -2; expected 0 or more"),
        ({"radius_px": float("nan")}, "the radius is nan"),
        ({"temperature": 0.0}, "the temperature is 0; expected a number above 0"),
        ({"temperature": float("nan")}, "the temperature is nan"),
    ],
)
def test_settings_that_are_refused(own: dict[str, Any], line: str) -> None:
    with pytest.raises(VitseeError, match=line):
        choose_settings(None, **own)
    with pytest.raises(VitseeError, match="no preset 'x'; expected walmer, dino, dinov3"):
        choose_settings("x")


# --------------------------------------------------------------------------------------- a GPU


def test_all_of_it_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a GPU that is not there: torch refuses to mix them with the CPU's."""
    nothing = np.zeros((0, 1), np.int64)
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    where = covering((32, 56), (4, 7), 8)
    tokens, seeds = clip(4, (4, 7))
    settings = PropagationSettings(radius=2, context=2)
    with FakeTensorMode():
        # What ties is decided by values, which such tensors do not have.
        monkeypatch.setattr(
            torch, "nonzero", lambda x: torch.from_numpy(nothing).to(x.device)
        )
        window = Window((4, 7), settings, (2, 2), device)
        run = Propagation(window, 6, 3)
        run.start(window.order_tokens(tokens[0]), window.order_labels(seeds))
        for x in tokens[1:]:
            maps = window.maps_of(run.step(window.order_tokens(x)))
            assert (maps.device, maps.shape) == (device, (3, 4, 7))
            found = Enlarger(where, "bilinear", device).winners(maps)
            assert (found.device, found.shape, found.dtype) == (
                device,
                (32, 56),
                torch.uint8,
            )

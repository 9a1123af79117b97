"""Maps of clips: principal components, cosines, norms and attention over frames, rows and columns,
against loops and the moving square known by hand; their strips."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from tests.clip_stores import (
    CELL,
    CLIP,
    DIM,
    FRAMES,
    LAYOUT,
    SIDE,
    TIMES,
    N,
    moving_attention,
    path_of,
    square_mask,
    square_pixels,
    square_tokens,
    write_clip_attention,
    write_clips,
)
from tests.printed_text import flaws
from tests.stores import write, write_residuals, write_sites
from vitsee_core.analyses import (
    attn_map,
    concepts,
    cosine_map,
    normratio,
    norms,
    pca,
    spectrum,
)
from vitsee_core.analyses.concepts.figure import make_crops
from vitsee_core.analyses.norms.stream_norms import neighbour_cosines
from vitsee_core.attention.head_maps import per_query
from vitsee_core.attention.heads import StoredAttention, even_shares
from vitsee_core.figures.clip_strips import Moment
from vitsee_core.figures.head_tiles import tile_table
from vitsee_core.figures.panels import drawn_for
from vitsee_core.figures.patch_maps.photos import evenly_with
from vitsee_core.figures.patch_maps.views import View
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.pages.report.captions import caption, headline
from vitsee_core.runtime.progress import Silent
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import name_examples
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError
from vitsee_stores.layout import AttentionGroup, StorePlan, TokenLayout, arrays

Array = NDArray[Any]
MAP = (TIMES, SIDE, SIDE)


def filled(table: Table, **where: Any) -> Array:
    """(frames, rows, cols) of the rows of one map, each cell there once."""
    found = np.full(MAP, np.nan)
    rows = table.frame.filter(**where)
    assert len(rows) == found.size
    for frame, row, col, value in rows.select("frame", "row", "col", "value").rows():
        assert np.isnan(found[frame, row, col])
        found[frame, row, col] = value
    return found


# ---------------------------------------------------------------- cosines


def test_cosines_of_a_patch_with_all_frames(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr")
    table = cosine_map.run(store, image=["clip1.mp4"], at=["2,1,2"], to=["clip2.mp4"])
    before = table.frame.columns.index("row")
    assert table.frame.columns[before - 1] == "frame"
    own = filled(table, site="blocks.1.out", image="clip1.mp4", metric="cosine")
    # The square is in row 1, at place 2 in column 2: the chosen patch is the square.
    assert np.array_equal(own, square_mask()[1].astype(float))
    other = filled(table, site="blocks.1.out", image="clip2.mp4", metric="cosine")
    assert np.array_equal(other, square_mask()[2].astype(float))
    noisy = filled(table, site="blocks.0.out", image="clip1.mp4", metric="cosine")
    x = square_tokens(noise=0.3, seed=0)[1].astype(np.float64)
    query = x[2 * SIDE**2 + 1 * SIDE + 2]
    for place, t in zip(np.ndindex(MAP), x, strict=True):
        expected = query @ t / (np.linalg.norm(query) * np.linalg.norm(t))
        assert noisy[place] == pytest.approx(expected, abs=1e-12)
    numbers = table.frame.filter(site="blocks.1.out", query="clip1.mp4").filter(
        table.frame.filter(site="blocks.1.out", query="clip1.mp4")["row"].is_null()
    )
    by_metric = dict(numbers.select("metric", "value").rows())
    others = LAYOUT.n_body - 1
    assert by_metric["cosine_mean"] == pytest.approx((TIMES - 1) / others)
    assert by_metric["cosine_neighbours"] == 0.0  # in its own frame there is one square
    assert by_metric["cosine_area"] == pytest.approx((TIMES - 1) / others)


def test_a_patch_without_a_frame_is_in_the_middle_of_time(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr")
    table = cosine_map.run(store, image=["0"], at=["1,3", "9,17px", "middle"])
    tokens = dict(table.frame.select("at", "token").unique(maintain_order=True).rows())
    assert tokens == {"1,3": "2,1,3", "9,17px": "2,2,1", "middle": "2,2,2"}
    assert [mark["time"] for mark in table.notes["marks"]] == [0.625] * 3
    with pytest.raises(
        SiteError, match=r"has no token 4,0,0: .* a grid of 4 x 4 at 4 times"
    ):
        cosine_map.run(store, image=["0"], at=["4,0,0"])


def test_a_frame_of_an_image_is_refused(tmp_path: Path) -> None:
    layout = TokenLayout((), (SIDE, SIDE), stride_px=(CELL, CELL))
    tokens = square_tokens().reshape(N * TIMES, SIDE * SIDE, DIM)
    store = write_sites(tmp_path / "s.zarr", {"blocks.0.out": tokens}, layout=layout)
    assert "frame" not in cosine_map.run(store, image=["0"]).frame.columns
    with pytest.raises(SiteError, match="has no token 1,0,0"):
        cosine_map.run(store, image=["0"], at=["1,0,0"])


def test_offsets_are_those_within_frames(tmp_path: Path) -> None:
    """Means by offset of a clip are those of its frames as images, over all pairs."""
    clips = write_clips(tmp_path / "clips.zarr")
    table = cosine_map.run(clips, offsets=True, sites=["blocks.0.out"])
    x = (
        square_tokens(noise=0.3, seed=0)
        .reshape(N, TIMES, SIDE, SIDE, DIM)
        .astype(np.float64)
    )
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    for row, col, value in table.frame.select("row", "col", "value").rows():
        found = [
            x[n, t, r, c] @ x[n, t, r + row, c + col]
            for n, t, r, c in np.ndindex(N, TIMES, SIDE, SIDE)
            if 0 <= r + row < SIDE and 0 <= c + col < SIDE
        ]
        assert value == pytest.approx(np.mean(found), abs=1e-12)


# ---------------------------------------------------------------- principal components


def test_components_are_of_all_frames(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr")
    table = pca.run(store, image=["clip2.mp4"], sites=["blocks.0.out"])
    x = square_tokens(noise=0.3, seed=0).astype(np.float64)
    fitted = PCA(3).fit(x.reshape(-1, DIM))
    share = table.frame.filter(metric="explained_variance", component=1)["value"][0]
    assert share == pytest.approx(fitted.explained_variance_ratio_[0], rel=1e-9)
    scores = filled(table, metric="score", component=1)
    expected = fitted.transform(x[2])[:, 0].reshape(MAP)
    expected *= np.sign(fitted.components_[0][np.abs(fitted.components_[0]).argmax()])
    assert np.allclose(scores, expected, atol=1e-9)
    on = square_mask()[2]
    assert scores[on].min() > scores[~on].max() or scores[on].max() < scores[~on].min()


def test_colours_of_grids_with_other_times_are_turned_to_each_other(
    tmp_path: Path,
) -> None:
    """A layer on half the times is compared with the reference at the times in between."""
    rng = np.random.default_rng(0)
    coarse = dataclasses.replace(LAYOUT, frames=2, stride_frames=4.0)
    fine = rng.normal(size=(N, TIMES, SIDE, SIDE, DIM))
    fine[:, 1] = fine[:, 0]
    fine[:, 3] = fine[:, 2]
    half = fine[:, ::2].copy()
    sites: Any = {
        "blocks.0.out": (half.reshape(N, -1, DIM), coarse),
        "blocks.1.out": (fine.reshape(N, -1, DIM), LAYOUT),
    }
    store = write_sites(tmp_path / "s.zarr", sites, clip=CLIP, pixels=square_pixels())
    table = pca.run(store, image=["0"])
    colours = table.notes["colours"]["s"]
    assert colours["blocks.0.out"]["aligned_on_patches"] == N * LAYOUT.n_body
    # The same tokens, each once or twice: the same axes but for their signs, so a mirror.
    turned = np.abs(np.array(colours["blocks.0.out"]["rotation"]))
    assert np.allclose(turned, np.eye(3), atol=1e-6)


def test_cells_at_the_same_place_and_time() -> None:
    view = View({}, None, (CELL * SIDE, CELL * SIDE))
    coarse = TokenLayout((), (2, 2), stride_px=(16.0, 16.0), frames=2, stride_frames=4.0)
    found = view.cells_like(coarse, 0, view, LAYOUT, 0).reshape(MAP)
    for time, row, col in np.ndindex(MAP):
        assert found[time, row, col] == (time // 2) * 4 + (row // 2) * 2 + col // 2
    image = TokenLayout((), (2, 2), stride_px=(16.0, 16.0))
    assert np.array_equal(view.cells_like(image, 0, view, image, 0), np.arange(4))


# ---------------------------------------------------------------- norms


def test_norms_of_every_patch_of_every_frame(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr", noise=(0.3,))
    table = norms.run(store, threshold=2.0)
    x = square_tokens(noise=0.3, seed=0).astype(np.float64)
    length = np.linalg.norm(x, axis=-1)
    found = filled(
        table.with_frame(table.frame.filter(table.frame["row"].is_not_null())),
        metric="norm",
    )
    assert np.allclose(found, length.mean(0).reshape(MAP), rtol=1e-6)
    rows = table.frame.filter(table.frame["row"].is_not_null(), metric="outlier_share")
    share = filled(table.with_frame(rows))
    assert np.allclose(share, (length > 2).mean(0).reshape(MAP))
    assert np.allclose(share, square_mask().mean(0))
    largest = np.abs(x).reshape(N, -1).argmax(1) // DIM
    names = ["{},{},{}".format(*np.unravel_index(place, MAP)) for place in largest]
    at = table.frame.filter(metric="massive_token_share")["at"][0]
    assert names.count(at) == max(map(names.count, names))


def test_neighbours_are_in_one_frame() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5, 6)).astype(np.float32)
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    expected = []
    for clip in unit:
        of_cells = []
        for t, r, c in np.ndindex(3, 4, 5):
            near = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
            near = [(a, b) for a, b in near if 0 <= a < 4 and 0 <= b < 5]
            of_cells.append(np.mean([clip[t, r, c] @ clip[t, a, b] for a, b in near]))
        expected.append(np.mean(of_cells))
    assert np.allclose(neighbour_cosines(x), expected, atol=1e-6)
    frames = neighbour_cosines(x.reshape(6, 4, 5, 6)).reshape(2, 3)
    assert np.allclose(neighbour_cosines(x), frames.mean(1))


def test_skip_and_branch_of_every_frame(tmp_path: Path) -> None:
    products = np.random.default_rng(0).uniform(1, 2, (N, LAYOUT.n_tokens, 3))
    store = write_residuals(
        tmp_path / "s.zarr", {"blocks.0.attn": products}, layout=LAYOUT, clip=CLIP
    )
    table = normratio.run(store, tokens=["each"], metrics=["norm_ratio"])
    stored = products.astype(np.float32).astype(np.float64)
    expected = np.sqrt(stored[..., 0] / stored[..., 1]).mean(0).reshape(MAP)
    assert np.allclose(filled(table, metric="norm_ratio"), expected)
    assert flaws(normratio.plot(table)) == []


# ---------------------------------------------------------------- attention


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_clip_attention(tmp_path_factory.mktemp("clips") / "s.zarr")


def test_mean_attention_over_frames(attended: Any) -> None:
    table = attn_map.run(attended, kind="mean-spatial")
    found = filled(table, site="blocks.1", head=0)
    assert np.allclose(found, square_mask().mean(0) / TIMES)
    assert np.allclose(filled(table, site="blocks.1", head=1), 1 / LAYOUT.n_body)


def test_a_card_has_one_head_of_each_block(attended: Any) -> None:
    table = attn_map.at_a_glance(attn_map.run(attended, kind="mean-spatial"))
    assert table.frame.select("site", "head").n_unique() == 2
    assert len(table) == 2 * LAYOUT.n_body


def test_rollout_over_frames(attended: Any) -> None:
    found = filled(attn_map.run(attended, kind="rollout"), metric="rollout")
    assert np.allclose(found, moving_attention().mean((0, 1, 2)).reshape(MAP))


def test_attention_of_one_clip(attended: Any) -> None:
    table = attn_map.run(
        attended, image=["clip1.mp4"], query=[(1, 2, 2)], sites=["blocks.1"]
    )
    a = moving_attention()[1]
    own = filled(table, token="mean", head=1, metric="attention")
    assert np.allclose(own, a[1].mean(0).reshape(MAP), rtol=1e-3)  # stored in float16
    asked = filled(table, token="1,2,2", head=1)
    assert np.allclose(asked, a[1, 1 * SIDE**2 + 2 * SIDE + 2].reshape(MAP), rtol=1e-3)
    assert asked[1].sum() == pytest.approx(1, rel=1e-3) and asked[[0, 2, 3]].sum() == 0
    assert np.allclose(filled(table, token="1,2,2", head=0), square_mask()[1] / TIMES)
    clip = table.notes["sheet"]["images"]["clip1.mp4"]
    assert list(clip["pictures"]) == ["1", "3", "5", "7"] and clip[
        "seconds"
    ] == pytest.approx(0.04)
    with pytest.raises(SiteError, match="has no token 2,2"):
        attn_map.run(attended, image=["0"], query=[(2, 2)])


def test_offsets_add_up_the_times() -> None:
    """The coverage of offsets in space is that of images, whatever the times: attention spread
    evenly over its own frame is flat."""
    aligned = np.zeros((N, 2, 2, 2 * SIDE - 1, 2 * SIDE - 1))
    a = moving_attention()
    for n, h in np.ndindex(N, 2):
        for q, k in np.ndindex(LAYOUT.n_body, LAYOUT.n_body):
            dy = k // SIDE % SIDE - q // SIDE % SIDE
            dx = k % SIDE - q % SIDE
            aligned[n, :, h, dy + SIDE - 1, dx + SIDE - 1] += (
                a[n, h, q, k] / LAYOUT.n_body
            )
    assert np.allclose(aligned.sum((-2, -1)), 1)
    assert np.allclose(per_query(aligned[:, :, 1]), 1 / SIDE**2)


# ---------------------------------------------------------------- strips


@pytest.mark.parametrize(
    "medium", [pytest.param("page", marks=pytest.mark.slow), "column"]
)
def test_strips_are_legible(tmp_path: Path, attended: Any, medium: str) -> None:
    store, other = (
        write_clips(tmp_path / "a.zarr"),
        write_clips(tmp_path / "b.zarr", noise=(0.1,)),
    )
    cosines = cosine_map.run(store, other, image=["0"], at=["1,0,1"])
    maps = [
        (attn_map, attn_map.run(attended, kind="mean-spatial")),
        (attn_map, attn_map.run(attended, image=["0"], query=[(1, 2, 2)])),
        (cosine_map, cosines),
        (pca, pca.run(store, other, image=["0", "2"])),
        (norms, norms.run(store, threshold=2.0)),
    ]  # fmt: skip
    for module, table in maps:
        with drawn_for(medium):
            figure = module.plot(table)  # type: ignore[attr-defined]
            assert flaws(figure) == [], module.__name__
            texts = {text.get_text() for text in figure.texts}
            if module is not norms:
                assert "frame" in texts and "2–3" in texts, module.__name__


def test_strips_from_the_table_alone(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "a.zarr")
    table = cosine_map.run(store, image=["0"], at=["1,0,1"])
    table.write(tmp_path / "t.csv")
    again = Table.read(tmp_path / "t.csv")
    images, before = (
        [np.asarray(image.get_array()) for image in cosine_map.plot(one).axes[0].images]
        for one in (again, table)
    )
    assert len(images) == len(before) and all(
        np.allclose(a, b) for a, b in zip(images, before, strict=True)
    )
    bare = cosine_map.plot(Table(table.frame))
    assert len(bare.axes[0].images) == 2 * TIMES


def test_times_that_are_shown() -> None:
    assert Moment(1, 4).frames(8) == "2–3" and Moment(3, 4).frames(4) == "3"
    assert [Moment(k, 4).at(8) for k in range(4)] == [1, 3, 5, 7]
    assert [Moment(k, 4).at(2) for k in range(4)] == [0, 0, 1, 1]
    assert evenly_with(range(9), 3, {3}) == [0, 3, 8]
    assert evenly_with(range(9), 3, {4}) == [0, 4, 8]
    assert evenly_with([2, 5], 13, {7}) == [2, 5]


@pytest.mark.parametrize(
    "time, said", [("shuffled", "random order"), ("still", "one frame")]
)
def test_the_caption_says_the_order(tmp_path: Path, time: str, said: str) -> None:
    clip = dataclasses.replace(CLIP, time=time)
    store = write_clips(tmp_path / "s.zarr", clip=clip)
    figure = pca.plot(pca.run(store, image=["0"]))
    assert any(said in text.get_text() for text in figure.texts)


def test_the_squares_frames_are_those_of_the_clip(tmp_path: Path) -> None:
    """The pictures in the notes are the middle frames of each place in time."""
    store = write_clips(tmp_path / "s.zarr")
    notes = pca.run(store, image=["clip1.mp4"]).notes["sheet"]
    assert notes["clip"] == {
        "frames": FRAMES, "time": "ordered", "shown": [0, 1, 2, 3], "of": TIMES,
    }  # fmt: skip
    pictures = notes["images"]["clip1.mp4"]["pictures"]
    for time, (row, col) in enumerate(path_of(1)):
        pixels = decode(pictures[str(2 * time + 1)])
        bright = np.argwhere(pixels[..., 0] > 200)
        assert bright.min(0).tolist() == [row * CELL, col * CELL]
        assert len(bright) == CELL**2


def test_no_attention_is_recomputed_frame_by_frame(tmp_path: Path) -> None:
    clip = dataclasses.replace(CLIP, by_frame=True)
    store = write_clip_attention(tmp_path / "s.zarr", level="summary", clip=clip)
    with pytest.raises(
        MissingInput, match="s holds clips that an image model saw frame by frame"
    ):
        attn_map.run(store, image=["0"])


def test_concepts_are_shown_in_their_frames(tmp_path: Path) -> None:
    """Crops of the square's cells: bright within, the ground or white around."""
    store = write_clips(tmp_path / "s.zarr")
    site = store.site("blocks.0.out")
    at = [(clip, time, *path_of(clip)[time]) for clip, time in ((1, 2), (0, 0), (2, 3))]
    rows = np.array([[clip for clip, *_ in at]])
    cells = np.array([[(time * SIDE + row) * SIDE + col for _, time, row, col in at]])
    (line,) = make_crops(store, site, rows, cells, None)
    for text, (_, _, row, col) in zip(line, at, strict=True):
        expected = np.full((3 * CELL, 3 * CELL), 255)
        for y, x in np.ndindex(3, 3):
            if row + y - 1 in range(SIDE) and col + x - 1 in range(SIDE):
                bright = (y, x) == (1, 1)
                expected[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL] = (
                    230 if bright else 40
                )
        pixels = decode(text)
        assert (pixels == expected.repeat(2, 0).repeat(2, 1)[..., None]).all()
    figure = concepts.plot(concepts.run(store, k=2, method="kmeans"))
    shown = [image.get_array() for image in figure.axes[0].images]
    assert all(np.ptp(np.asarray(pixels)) > 0 for pixels in shown) and len(shown) == 2 * N


# ---------------------------------------------------------------- two attentions of a block


def divided(path: Path, cls: float) -> Store:
    """A block with attention over time at a place, spread evenly, and attention within a frame,
    where the class token gets this share of each query's, and the patches the rest, evenly."""
    cells, times = SIDE * SIDE, TIMES
    with_cls = dataclasses.replace(LAYOUT, prefix=("cls",))
    groups = (
        AttentionGroup("", ("blocks.0.time",), (2,), LAYOUT, (times, 1, 1)),
        AttentionGroup("space", ("blocks.0.space",), (2,), with_cls, (1, SIDE, SIDE)),
    )
    places = tuple((group.blocks[0], 0, 0.0) for group in groups)
    plan = StorePlan(
        N,
        2,
        "none",
        (),
        groups,
        "rows",
        places=places,
        clip=CLIP,
        inputs=(3, CELL * SIDE, CELL * SIDE),
    )
    n = cells * times
    time = np.full((N, 1, 2, n), 1 / n)
    space = np.concatenate(
        [np.full((N, 1, 2, 1), cls), np.full((N, 1, 2, n), (1 - cls) / n)], -1
    )
    values = {"input": square_pixels()}
    for group, received in zip(groups, (time, space), strict=True):
        values |= {
            f"{group.folder}received": received,
            f"{group.folder}received_rows": received,
            f"{group.folder}received_max": received.max(-1),
            f"{group.folder}received_argmax": received.argmax(-1),
            f"{group.folder}entropy": np.full((N, 1, 2), 1.0 + len(group.layout.prefix)),
            f"{group.folder}aligned": np.full(
                (N, 1, 2, 2 * SIDE - 1, 2 * SIDE - 1), 1 / 49
            ),
        }
    there = arrays(plan)
    kept = {name: own for name, own in values.items() if name in there}
    return write(path, plan, kept, ids=[f"clip{i}.mp4" for i in range(N)])


def test_a_token_that_all_windows_see_is_a_sink_above_its_even_share(
    tmp_path: Path,
) -> None:
    """Even attention within a frame of 16 cells gives the class token 1/17, not 1/65: a score of
    1, as each cell's is, which gets 16/17 of 64."""
    for cls, score in ((1 / 17, 1.0), (10.5 / 17, 10.5)):
        store = divided(tmp_path / f"{score}.zarr", cls)
        table = attn_map.run(store, kind="sink")
        most = table.frame.filter(metric="sink_max")
        assert most["value"].to_list() == pytest.approx([1, 1, score, score], rel=1e-3)
        shares = table.frame.filter(metric="sink_share", token="cls")
        assert shares["value"].to_list() == [float(score > 10)] * 2
        typical = table.frame.filter(metric="sink_median", site="blocks.0.space")
        rest = (1 - cls) / 64 / (16 / 17 / 64)
        assert typical["value"].to_list() == pytest.approx([rest] * 2, rel=1e-3)
        attn_map.plot(table)


@pytest.mark.parametrize("grid", [(3, 4), (5, 5)])
def test_even_shares_against_loops(tmp_path: Path, grid: tuple[int, int]) -> None:
    layout = TokenLayout(("cls", "reg0"), grid, frames=3, stride_frames=1.0)
    block = StoredAttention("b", 0, 0.0, layout, "", 0, 1, (2, 3), 2)
    cells = list(np.ndindex(3, *grid))
    found = np.zeros(2 + len(cells))
    for q in cells:
        seen = [
            k
            for k in cells
            if (k[0] // 2, k[1] // 2, k[2] // 3) == (q[0] // 2, q[1] // 2, q[2] // 3)
        ]
        for key in (0, 1, *(2 + cells.index(k) for k in seen)):
            found[key] += 1 / (2 + len(seen)) / len(cells)
    assert even_shares(block) == pytest.approx(found, rel=1e-12)


def test_both_attentions_of_a_block_are_drawn(tmp_path: Path) -> None:
    """Neither takes the other's place in the maps and pictures."""
    store = divided(tmp_path / "s.zarr", 1 / 17)
    table = attn_map.run(store, kind="aligned")
    (tiles,) = tile_table(table.frame)
    assert (
        tiles.row_labels == ["block 0, time", "block 0, space"] and len(tiles.maps) == 4
    )
    attn_map.plot(table)
    figure = attn_map.plot(attn_map.run(store, kind="entropy"))
    left, right = figure.axes[:2]
    (image,) = right.get_images()
    assert np.asarray(image.get_array()).tolist() == [[1, 1], [2, 2]]
    assert [text.get_text() for text in left.get_xticklabels()] == ["0 time", "0 space"]
    assert [text.get_text() for text in right.get_yticklabels()] == ["0 time", "0 space"]


# ---------------------------------------------------------------- words


def test_clips_are_called_clips(tmp_path: Path) -> None:
    """By progress, headlines, captions and figures, which say images of images."""
    units: list[str] = []

    class Heard(Silent):
        def start(self, total: int, done: int = 0, unit: str = "images") -> None:
            units.append(unit)

    store = write_clips(tmp_path / "s.zarr")
    table = spectrum.run(store, progress=Heard())
    assert units and all(unit.startswith("clips") for unit in units)
    assert table.notes["examples"] == "clips"
    said = " ".join(text for _, text in headline(spectrum.ANALYSIS, table))
    assert "of 3 clips: too few" in said and "image" not in said
    assert "of clips" in caption(spectrum.ANALYSIS, table).reading
    assert "images" not in caption(spectrum.ANALYSIS, table).reading
    texts = [text.get_text() for text in spectrum.plot(table).findobj(Text)]  # type: ignore[attr-defined]
    assert any("of 3 clips: too few" in text for text in texts)
    assert any("half of the clips" in text for text in texts)
    assert not any("images" in text for text in texts)
    about = {"examples": "clips"}
    assert (
        name_examples("of 1 image, images/a.mp4, a/images", about)
        == "of 1 clip, images/a.mp4, a/images"
    )
    assert (
        name_examples("95 % over images. An image", about) == "95 % over clips. An image"
    )
    assert name_examples("over images", {}) == "over images"

"""The page of clips: each place in time an image of its own, a slider for time."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import NONE, PROGRAM, Browser
from tests.clip_stores import (
    CELL,
    CLIP,
    DIM,
    LAYOUT,
    SIDE,
    TIMES,
    N,
    moving_attention,
    square_mask,
    square_pixels,
    square_tokens,
    write_clip_attention,
    write_clips,
)
from tests.stores import write_sites
from tests.test_explore_browser import after, open_page
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.figures.patch_maps.views import View
from vitsee_core.pages.explore import explore
from vitsee_core.pages.explore.contents import read_sites
from vitsee_core.pages.explore.readouts import attention_of, query_cells
from vitsee_core.runtime.progress import SILENT
from vitsee_stores.errors import SiteError, StoreMismatch
from vitsee_stores.layout import TokenLayout


def about_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script[^>]*id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    about: dict[str, Any] = json.loads(found[1])
    return about


def test_a_page_of_clips(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr")
    explore(store, output=tmp_path / "p.html", image=["clip1.mp4", "clip2.mp4"])
    about = about_of(tmp_path / "p.html")
    assert about["times"] == ["0–1", "2–3", "4–5", "6–7"]
    names = [image["id"] for image in about["images"]]
    assert names[:2] == ["clip1.mp4, frame 0–1", "clip1.mp4, frame 2–3"]
    assert len(names) == 2 * TIMES and names[TIMES] == "clip2.mp4, frame 0–1"
    pictures = {image["picture"] for image in about["images"]}
    assert len(pictures) == 2 * TIMES and "" not in pictures
    assert about["models"][0]["sites"][0]["grid"] == [SIDE, SIDE]
    text = (tmp_path / "p.html").read_text()
    assert 'id="time"' in text and "2 clips of 3" in text


def test_tokens_are_those_of_each_frame(tmp_path: Path) -> None:
    """Cosines of the packed tokens over all frames, against the tokens themselves."""
    store = write_clips(tmp_path / "s.zarr", noise=(0.3,))
    sites = store.select(["blocks"])
    rows = [row for row in (0, 2) for _ in range(TIMES)]
    shown = SheetImages(store, View.of(store, sites), rows, sites, TIMES)
    (own,) = read_sites(shown, 0, lambda _: None)
    x = square_tokens(noise=0.3, seed=0)[[0, 2]].reshape(2 * TIMES, SIDE * SIDE, DIM)
    assert np.allclose(own.norms, np.linalg.norm(x, axis=-1), rtol=1e-5)
    assert own.layout.frames is None and own.scores is not None
    assert own.scores.values.shape == (2 * TIMES, SIDE * SIDE, 3)


def test_attention_of_each_frame(tmp_path: Path) -> None:
    store = write_clip_attention(tmp_path / "s.zarr")
    a = moving_attention().reshape(N, 2, TIMES, SIDE**2, TIMES, SIDE**2)
    rows = [row for row in (1, 2) for _ in range(TIMES)]
    shown = SheetImages(
        store, View({}, None, (CELL * SIDE, CELL * SIDE)), rows, [], TIMES
    )
    found = attention_of(shown, None, "cpu", SILENT)[1]
    assert found.heads.shape == (2 * TIMES, 2, SIDE**2) and found.patches is not None
    for k, (row, time) in enumerate(
        (row, time) for row in (1, 2) for time in range(TIMES)
    ):
        mean = a[row].mean((1, 2))[:, time]
        assert np.allclose(found.heads[k], mean, atol=1e-3)
        for i, cell in enumerate(query_cells((SIDE, SIDE))):
            expected = a[row][:, time, cell, time].mean(0)
            assert np.allclose(found.patches[k, i], expected, atol=1e-3)
    on = square_mask()[1].reshape(TIMES, -1)
    assert np.allclose(found.heads[:TIMES, 0], on / TIMES, atol=1e-3)


def test_other_times_are_refused(tmp_path: Path) -> None:
    half = dataclasses.replace(LAYOUT, frames=2, stride_frames=4.0)
    tokens = square_tokens()
    of_half = tokens[:, : half.n_tokens]
    about: Any = {"clip": CLIP, "pixels": square_pixels()}
    both: Any = {"blocks.0.out": (tokens, LAYOUT), "blocks.1.out": (of_half, half)}
    mixed = write_sites(tmp_path / "m.zarr", both, **about)
    with pytest.raises(
        SiteError, match=r"m: blocks\.0\.out has 4 places in time and blocks\.1"
    ):
        explore(mixed, output=tmp_path / "p.html")
    first = write_sites(
        tmp_path / "a.zarr", {"blocks.0.out": tokens}, layout=LAYOUT, **about
    )
    other = write_sites(
        tmp_path / "b.zarr", {"blocks.0.out": of_half}, layout=half, **about
    )
    with pytest.raises(StoreMismatch, match="a and b have 4 and 2 places in time"):
        explore(first, other, output=tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_a_page_of_images_has_no_time(tmp_path: Path) -> None:
    layout = TokenLayout((), (SIDE, SIDE), stride_px=(CELL, CELL))
    tokens = square_tokens().reshape(N * TIMES, SIDE * SIDE, DIM)
    pixels = square_pixels()[:, ::2].reshape(N * TIMES, 3, CELL * SIDE, CELL * SIDE)
    store = write_sites(
        tmp_path / "s.zarr", {"blocks.0.out": tokens}, layout=layout, pixels=pixels
    )
    explore(store, output=tmp_path / "p.html", images=2)
    assert "times" not in about_of(tmp_path / "p.html")
    assert 'id="time"' not in (tmp_path / "p.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=NONE)
def test_the_slider_goes_through_one_clip(tmp_path: Path) -> None:
    store = write_clips(tmp_path / "s.zarr")
    explore(store, output=tmp_path / "p.html")
    move = "(i => {{ i.value = '{}'; i.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
    with Browser(tmp_path / "profile") as browser:
        open_page(browser, tmp_path / "p.html", "#image=5")  # place 1 in time of clip 1
        assert browser.run("document.getElementById('time').value") == "1"
        after(browser, move.format(3) + "(document.getElementById('time'))")
        assert "image=7" in browser.run("location.hash")
        said = browser.run("document.getElementById('said').textContent")
        assert said.startswith("clip1.mp4, frame 6–7")
        assert (
            browser.run("document.getElementById('at-time').textContent") == "frame 6–7"
        )
        assert browser.errors == []

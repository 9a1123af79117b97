"""Python: tables that draw themselves, CKA of arrays, what a store says of its model, progress."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import nn
from torchvision import transforms

import vitsee
from tests.stores import write_sites
from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]


def features(n: int, dim: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(n, dim)) + 3


def slow_cka(x: Array, y: Array) -> float:
    """Debiased CKA by loops over pairs of images (Song et al. 2012, Eq. 5)."""

    def hsic(k: Array, m: Array) -> float:
        n = len(k)
        both = rows = 0.0
        sums = [
            sum(own[i, j] for i in range(n) for j in range(n) if i != j) for own in (k, m)
        ]
        for i in range(n):
            others = [j for j in range(n) if j != i]
            both += sum(k[i, j] * m[j, i] for j in others)
            rows += sum(k[i, j] for j in others) * sum(m[i, j] for j in others)
        found = both + sums[0] * sums[1] / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
        return float(found / (n * (n - 3)))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5


def test_cka_of_arrays_against_loops() -> None:
    x = features(9, 4, 0)
    y = x @ features(4, 3, 1) + features(9, 3, 2)
    table = vitsee.cka(x, y)
    assert table["value"][0] == pytest.approx(slow_cka(x, y), abs=1e-9)
    assert vitsee.cka(x, 2 * x)["value"][0] == pytest.approx(1)
    # Tokens are flattened; a tensor is an array.
    tokens = np.stack([x[:, :2], x[:, 2:]], 1)
    again = vitsee.cka(torch.from_numpy(tokens), y)  # type: ignore[arg-type]
    assert again["value"][0] == pytest.approx(table["value"][0])


def test_cka_of_arrays_is_that_of_stores(tmp_path: Path) -> None:
    x, y = features(60, 5, 0).astype(np.float32), features(60, 4, 1).astype(np.float32)
    y[:, :2] += x[:, :2]
    store = write_sites(tmp_path / "a.zarr", {"x": x, "y": y})
    theirs = vitsee.cka(store, sites_a="x", sites_b="y", no_cache=True)
    own = vitsee.cka(store.vectors("x")[:], store.vectors("y")[:])
    assert own["value"][0] == pytest.approx(theirs["value"][0], abs=1e-6)
    assert own["low"][0] < own["value"][0] < own["high"][0]
    # Blocks are drawn otherwise: intervals of about the same width.
    widths = [float(t["high"][0] - t["low"][0]) for t in (own, theirs)]
    assert widths[0] == pytest.approx(widths[1], rel=0.6)


def test_arrays_that_are_refused(tmp_path: Path) -> None:
    x = features(9, 4, 0)
    with pytest.raises(VitseeError, match="have 9 and 8 images"):
        vitsee.cka(x, x[:8])
    with pytest.raises(VitseeError, match="at least 4"):
        vitsee.cka(x[:3], x[:3])
    with pytest.raises(VitseeError, match=r"second array is float64 of shape \(9,\)"):
        vitsee.cka(x, x[:, 0])
    with pytest.raises(VitseeError, match="first array has values that are not finite"):
        vitsee.cka(np.where(x > 3, np.nan, x), x)
    with pytest.raises(
        TypeError, match=r"cka.. of arrays takes 2 of them and nothing else"
    ):
        vitsee.cka(x, x, tokens="mean")
    with pytest.raises(TypeError, match="takes 2 of them"):
        vitsee.cka(x, "a.zarr")
    with pytest.raises(
        TypeError, match=r"attn_dist.. takes stores or their paths, no arrays"
    ):
        vitsee.attn_dist(x)


@pytest.mark.slow
def test_a_table_draws_itself(tmp_path: Path) -> None:
    store = write_sites(
        tmp_path / "a.zarr", {"x": features(20, 4, 0), "y": features(20, 4, 1)}
    )
    table = vitsee.spectrum(store, sites=["x", "y"])
    for own in (table, table.filter(metric="rankme")):
        assert isinstance(own.plot(), Figure)
    table.write(tmp_path / "r.csv")
    assert isinstance(Table.read(tmp_path / "r.csv").plot(), Figure)
    with pytest.raises(VitseeError, match="this table has no figure of its own"):
        Table({"a": np.zeros(2)}).plot()


def test_what_made_a_store(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", {"x": features(8, 4, 0)})
    assert store.model == store.manifest.model and store.model is not store.manifest.model
    store.model.clear()
    assert store.model


def test_a_module_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.ReLU())
    prepare = transforms.Compose(
        [transforms.Resize(16), transforms.CenterCrop(16), transforms.ToTensor()]
    )
    options: dict[str, Any] = {"transform": prepare, "name": "mine", "images": 2}
    with caplog.at_level(logging.WARNING):
        vitsee.extract(mine, "demo:test", tmp_path / "m.zarr", sites="modules", **options)
    (line,) = [
        record.message for record in caplog.records if "mine lacks" in record.message
    ]
    assert "attention: no block has a softmax over tokens" in line and "residual" in line


# ---------------------------------------------------------------- progress


def test_progress_outside_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    progress = vitsee.NotebookProgress("mine")
    progress.start(4, unit="sites")
    progress.advance(4)
    progress.stop()
    assert capsys.readouterr().err == "mine: 4 of 4 sites, 0 s\n"


def test_progress_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line that is renewed; escaped."""
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)

    def display(one: str, display_id: bool) -> Any:
        shown.append(one)
        return handle

    shell = SimpleNamespace(kernel=object())
    package = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", package)  # type: ignore[arg-type]
    parts = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", parts)  # type: ignore[arg-type]
    store = write_sites(tmp_path / "a.zarr", {"x": features(8, 4, 0)})
    vitsee.spectrum(store, sites=["x"], progress=vitsee.NotebookProgress("<b>"))
    assert shown[0].startswith(
        '<progress value="0" max="16"></progress> &lt;b&gt;: 0 of 16 images'
    )
    assert "16 of 16 images" in shown[-1] and capsys.readouterr().err == ""

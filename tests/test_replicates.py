"""Block replicates: against the analysis of a store without the block, and their file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import attention_maps, attention_rows
from tests.attention_maps import random_attention
from tests.attention_rows import random_rows, save_mask
from tests.command_line import invoke as command
from tests.stores import write_labelled, write_residuals, write_sites
from tests.tables import having
from tests.test_erf import write as write_fields
from vitsee_core.analyses import (
    cka,
    erf,
    head_types,
    knn,
    localize,
    normratio,
    probe,
    saliency,
)
from vitsee_core.analyses.normratio.sublayer_estimates import METRICS
from vitsee_core.statistics.jackknife import (
    SHARE,
    Blocks,
    interval,
    means_without,
    standard_error,
)
from vitsee_core.tables import replicates
from vitsee_core.tables.results import Table, read_replicates, read_result
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
N = 42  # in 20 blocks, of two and of three images
LABELS = [0, 1, 2] * (N // 3)


def labelled(path: Path, kept: Array, seed: int = 0, hash_offset: int = 0) -> Any:
    path.parent.mkdir(exist_ok=True)
    x = np.random.default_rng(seed).normal(size=(N, 3, 4))
    x[:, :, 0] += np.array(LABELS)[:, np.newaxis]
    return write_labelled(
        *(path, {"embed": x[kept], "blocks.0.out": x[kept] ** 2}, np.array(LABELS)[kept]),
        classes=["a", "b", "c"],
        hash_offset=hash_offset,
        index=np.flatnonzero(kept).tolist(),
    )


def residuals(path: Path, kept: Array) -> Any:
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    z, f = rng.normal(size=(2, N, 7, 4))
    products = np.stack([(z * z).sum(-1), (f * f).sum(-1), (z * f).sum(-1)], -1)
    return write_residuals(path, {"blocks.0.mlp": products[kept]})


def of_knn(folder: Path, kept: Array) -> Table:
    train = labelled(folder / "train.zarr", np.ones(N, bool), 5, hash_offset=1000)
    return knn.run(
        train, labelled(folder / "a.zarr", kept), sites="all", ks=(1, 3), per_class=True
    )


def of_probe(folder: Path, kept: Array) -> Table:
    train = labelled(folder / "train.zarr", np.ones(N, bool), 5, hash_offset=1000)
    test = labelled(folder / "a.zarr", kept)
    settings: dict[str, Any] = {"shots": (4,), "seeds": 2, "l2": (1.0,)}
    return probe.run(train, test, sites="all", tokens=("cls", "each"), **settings)


def of_normratio(folder: Path, kept: Array) -> Table:
    table = normratio.run(residuals(folder / "a.zarr", kept), tokens=("each", "patches"))
    # Replicates of a median are those of each image's influence on it, not the median of the rest,
    # whose jackknife is not consistent: tests/test_medians.py.
    means = [metric for metric in METRICS if "median" not in metric]
    return having(table, metric=means)


def of_cka(folder: Path, kept: Array) -> Table:
    return cka.run(
        labelled(folder / "a.zarr", kept), sites="all", no_cache=True, device="cpu"
    )


def of_saliency(folder: Path, kept: Array) -> Table:
    grid, masks = (2, 3), folder / "masks"
    rows = random_rows(attention_rows.layout(grid), N, [2, 3], seed=3)
    for i, tokens in enumerate(np.random.default_rng(4).choice([0, 1], (N, *grid))):
        save_mask(masks / f"{i}.png", tokens)
    mean, cls = (tuple(a[kept] for a in of or ()) for of in (rows.mean, rows.cls))
    rows = dataclasses.replace(rows, mean=mean, cls=cls)
    index = np.flatnonzero(kept).tolist()
    store = attention_rows.write(folder / "a.zarr", [rows], size=(8, 12), index=index)
    return having(saliency.run(store, masks=masks), baseline="")


def of_localize(folder: Path, kept: Array) -> Table:
    folder.mkdir()
    layout = TokenLayout(("cls",), (2, 3), stride_px=(4.0, 4.0))
    rng = np.random.default_rng(5)
    pixels = rng.integers(0, 255, (N, 3, 8, 12), dtype=np.uint8)
    x = (
        pixels.reshape(N, 3, 2, 4, 3, 4)
        .mean((3, 5))
        .transpose(0, 2, 3, 1)
        .reshape(N, 6, 3)
    )
    x = np.concatenate([x.mean(1, keepdims=True), x], 1) + rng.normal(size=(N, 7, 3)) * 9
    store = write_sites(
        *(folder / "a.zarr", {"blocks.0.out": x[kept]}),
        layout=layout,
        pixels=pixels[kept],
        transform={"mean": (0.5,) * 3, "std": (0.5,) * 3},
    )
    return localize.run(store)


def of_head_types(folder: Path, kept: Array) -> Table:
    """Its blocks are runs of slabs, here of one image."""
    folder.mkdir()
    made = random_attention(attention_maps.layout(), N, [2, 3], seed=6)
    made = dataclasses.replace(made, a=tuple(a[kept] for a in made.a))
    table = head_types.run(attention_maps.write(folder / "a.zarr", [made], slab=1))
    return having(table, metric=list(head_types.SCORES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "analyse",
    [of_knn, of_probe, of_normratio, of_cka, of_saliency, of_localize, of_head_types],
)
def test_a_replicate_is_the_value_without_the_block(
    analyse: Callable[[Path, Array], Table], tmp_path: Path
) -> None:
    whole = analyse(tmp_path / "whole", np.ones(N, bool))
    assert whole.replicates is not None
    assert whole.replicates.shape == (len(whole), 20)
    labels = np.arange(N) * 20 // N
    for b in (0, 7, 19):
        part = analyse(tmp_path / str(b), labels != b)
        np.testing.assert_allclose(
            whole.replicates[:, b], part["value"].astype(float), rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_a_replicate_of_a_field_is_that_without_a_slab(tmp_path: Path) -> None:
    """Fields are stored as sums over slabs."""
    counts, fields = (
        np.full(12, 2),
        {"blocks.0.out": np.random.default_rng(7).random((12, 8, 12))},
    )
    fields["blocks.0.out"] **= 4
    metrics = ("radius50_px", "radius90_px", "offset_px")
    whole = erf.run(
        write_fields(tmp_path / "a.zarr", fields, counts, slab=2), metrics=metrics
    )
    assert whole.replicates is not None and whole.replicates.shape == (3, 12)
    for k in (0, 5, 11):
        rest = {name: np.delete(field, k, 0) for name, field in fields.items()}
        store = write_fields(tmp_path / f"{k}.zarr", rest, np.delete(counts, k), slab=2)
        part = erf.run(store, metrics=metrics)["value"].astype(float)
        np.testing.assert_allclose(whole.replicates[:, k], part, rtol=1e-6)


def test_the_spread_is_that_of_the_replicates(tmp_path: Path) -> None:
    table = of_cka(tmp_path, np.ones(N, bool))
    assert table.replicates is not None
    np.testing.assert_allclose(standard_error(table.replicates), table["std"], rtol=1e-12)


def test_standard_error_by_hand() -> None:
    """Replicates 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9; sqrt(3 / 4 * 14)."""
    assert standard_error(np.array([1.0, 2, 3, 6])) == pytest.approx(math.sqrt(10.5))


def test_means_without_by_hand(tmp_path: Path) -> None:
    sums, counts = np.array([4.0, 0, 6]), np.array([2.0, 0, 1])
    np.testing.assert_array_equal(means_without(sums, counts), [6, 10 / 3, 2])
    assert np.isnan(means_without(np.array([4.0, 0]), np.array([2.0, 0]))[0])
    store = labelled(tmp_path / "a.zarr", np.ones(N, bool))
    mask = np.arange(N) % 2 == 0  # 21 images in 20 blocks: the first two in one
    blocks = Blocks.of(store, mask, 0)
    assert blocks.n == 20 and blocks.labels.tolist()[:3] == [0, 0, 1]
    right = np.arange(21) < 2
    found = blocks.means_without(right)
    assert found[0] == 0 and found[1] == pytest.approx(2 / 20)
    among = np.arange(21) != 0
    assert blocks.means_without(right, among)[1] == pytest.approx(1 / 19)
    assert Blocks.of(store, ~mask, 0).digest != blocks.digest


def test_tables_keep_their_replicates() -> None:
    rows: list[dict[str, Any]] = [
        {"value": 1.0, "replicates": np.array([1.0, 2])},
        {"value": 2.0},
    ]
    table = Table.from_rows(rows, ["value"])
    assert table.replicates is not None
    np.testing.assert_array_equal(table.replicates, [[1, 2], [np.nan, np.nan]])
    taken = table.with_frame(table.frame.reverse())
    np.testing.assert_array_equal(taken.replicates, [[np.nan, np.nan], [1, 2]])
    longer = Table({"value": np.array([3.0]), "replicates": np.array([[5.0, 6, 7]])})
    both = Table.concat([table, longer, Table({"value": np.array([4.0])})])
    assert both.replicates is not None and both.replicates.shape == (4, 3)
    np.testing.assert_array_equal(both.replicates[[0, 2]], [[1, 2, np.nan], [5, 6, 7]])
    with pytest.raises(ValueError, match="columns of one length"):
        Table({"value": np.array([3.0]), "replicates": np.zeros((2, 3))})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("r.csv", "r.replicates.csv"),
        ("r.csv.gz", "r.replicates.csv.gz"),
        ("r.json", None),
    ],
)
def test_command_writes_them_beside_the_table(
    name: str, expected: str | None, tmp_path: Path
) -> None:
    labelled(tmp_path / "a.zarr", np.ones(N, bool))
    out = tmp_path / name
    result = command(
        "cka", tmp_path / "a.zarr", "--no-cache", "--sites", "all", "-o", out
    )
    assert result.exit_code == 0, result.stderr
    assert not replicates.replicates_path(out).exists()
    refused = command("cka", tmp_path / "a.zarr", "--no-cache", "-o", out, "--replicates")
    assert refused.exit_code == 1 and name in refused.stderr
    args = ("--no-cache", "--sites", "all", "-o", out, "--replicates", "--force")
    result = command("cka", tmp_path / "a.zarr", *args)
    assert result.exit_code == 0, result.stderr
    assert replicates.replicates_path(out).name == (expected or "r.replicates.json")
    file = read_result(out)
    table = cka.run(tmp_path / "a.zarr", sites="all", no_cache=True)
    np.testing.assert_array_equal(read_replicates(file).replicates, table.replicates)
    beside = read_result(replicates.replicates_path(out)).table
    assert "site_a" in beside.written.columns and "std" not in beside.written.columns


def test_replicates_of_another_table_are_refused(tmp_path: Path) -> None:
    labelled(tmp_path / "a.zarr", np.ones(N, bool))
    out, other = tmp_path / "r.csv", tmp_path / "other.csv"
    for path, sites in ((out, "all"), (other, "embed")):
        args = ("--no-cache", "--sites", sites, "-o", path, "--replicates")
        assert command("cka", tmp_path / "a.zarr", *args).exit_code == 0
    other.with_name("other.replicates.csv").replace(tmp_path / "r.replicates.csv")
    with pytest.raises(VitseeError, match="no replicates of the rows"):
        read_replicates(read_result(out))
    text = out.read_text()
    command(
        "cka",
        tmp_path / "a.zarr",
        *args[:3],
        "embed",
        "-o",
        out,
        "--replicates",
        "--force",
    )
    lines = (tmp_path / "r.replicates.csv").read_text().replace("embed", "stem")
    (tmp_path / "r.replicates.csv").write_text(lines)
    out.write_text("\n".join(text.splitlines()[:2]) + "\n")
    with pytest.raises(
        VitseeError, match=r"belongs to another table.*row 1 has site_a stem"
    ):
        read_replicates(read_result(out))
    (tmp_path / "r.replicates.csv").unlink()
    with pytest.raises(VitseeError, match=r"has no replicates beside it.*--replicates"):
        read_replicates(read_result(out))


def test_replicates_need_a_table_file(tmp_path: Path) -> None:
    result = command("cka", tmp_path / "a.zarr", "--replicates")
    assert result.exit_code == 2 and "give -o TABLE too" in result.stderr


def test_no_replicates_is_said(tmp_path: Path) -> None:
    """Repeats of minibatches are no blocks of images."""
    labelled(tmp_path / "a.zarr", np.ones(N, bool))
    out = tmp_path / "r.csv"
    args = ("--estimator", "minibatch", "--batch", "8", "--repeats", "2", "--no-cache")
    result = command("cka", tmp_path / "a.zarr", *args, "-o", out, "--replicates")
    assert result.exit_code == 0, result.stderr
    assert "r.replicates.csv is not written: no value of this table" in result.stderr
    assert out.exists() and not replicates.replicates_path(out).exists()


def test_an_interval_ends_where_values_can_end() -> None:
    value, replicates = (
        np.array([0.1, 0.5, 1.2]),
        np.array([[0.0, 0.2], [0.4, 0.6], [1.1, 1.3]]),
    )
    error, low, high = interval(value, replicates)
    assert low[0] < 0
    assert high[1] > 1
    _, cut_low, cut_high = interval(value, replicates, SHARE)
    assert cut_low.tolist() == [0, max(low[1], 0), max(low[2], 0)]
    assert cut_high.tolist() == [min(high[0], 1), 1, 1.2]  # a value beyond is kept
    assert error.tolist() == pytest.approx([0.1] * 3)

"""vitsee export, and tokens as a stream for training."""

from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch.utils.data import DataLoader

from tests.features import vit_sites
from tests.stores import write_model
from vitsee_cli.main import main
from vitsee_core.features.exporting import export
from vitsee_core.features.torch_dataset import TokenDataset
from vitsee_stores import Store, open_store
from vitsee_stores.errors import SiteError, VitseeError

Array = NDArray[Any]
N = 21
SITES = vit_sites(N)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    valid = np.ones(N, bool)
    valid[4] = False
    return write_model(tmp_path_factory.mktemp("export") / "a.zarr", SITES, valid=valid)


def rows(x: Any) -> Array:
    found: Array = np.delete(np.asarray(x), 4, 0)
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("all", lambda x: x),
        ("patches", lambda x: x[:, 1:]),
        ("cls", lambda x: x[:, 0]),
        ("1,2", lambda x: x[:, 1 + 5]),
    ],
)
def test_arrays_in_the_stores_order(
    store: Store, tmp_path: Path, tokens: str, expected: Any
) -> None:
    wanted = expected(rows(SITES["blocks.0.out"]))
    shape = export(store, "blocks.0.out", tmp_path / "x.npy", tokens=tokens)
    found = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert found.shape == shape == wanted.shape
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    export(store, "blocks.0.out", tmp_path / "x.safetensors", tokens=tokens)
    again = load_file(tmp_path / "x.safetensors")["features"]
    assert again.dtype == found.dtype
    assert np.array_equal(again, found)
    about = json.loads((tmp_path / "x.npy.json").read_text())
    assert about["site"] == "blocks.0.out"
    assert about["shape"] == list(shape)
    assert len(about["tokens"]) == (shape[1] if len(shape) == 3 else 1)


def test_parquet_has_ids_and_labels(store: Store, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    export(store, "blocks.0.out", tmp_path / "x.parquet", tokens="cls")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["row", "index", "id", "label", "split", "features"]
    assert table["id"].to_pylist() == rows(store.samples.id).tolist()
    assert table["row"].to_pylist() == [k for k in range(N) if k != 4]
    found = np.stack(table["features"].to_numpy())
    assert found == pytest.approx(rows(SITES["blocks.0.out"])[:, 0], rel=1e-3, abs=1e-3)
    with pytest.raises(SiteError, match=r"6 vectors per image; \.parquet takes one"):
        export(store, "blocks.0.out", tmp_path / "y.parquet", tokens="patches")
    assert not (tmp_path / "y.parquet").exists()


def test_float16_is_refused_where_numbers_are_beyond_it(tmp_path: Path) -> None:
    large = {"pooled": np.full((8, 3), 1e6)}
    store = write_model(tmp_path / "a.zarr", large)
    with pytest.raises(VitseeError, match=r"numbers up to 1e\+06, beyond float16"):
        export(store, "pooled", tmp_path / "x.npy", dtype="float16")
    assert not list(tmp_path.glob("*x.npy*"))
    assert not list(tmp_path.glob(".vitsee*"))
    export(store, "pooled", tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy").dtype == np.float32


@pytest.mark.parametrize(
    ("site", "name", "more", "message"),
    [
        ("blocks", "x.npy", {}, "blocks chooses 3 sites of a; expected one"),
        ("blocks.9.out", "x.npy", {}, "blocks.9.out"),
        ("pooled", "x.csv", {}, r"expected a name that ends in \.npy"),
        ("pooled", "x.npy", {"dtype": "int8"}, "no dtype 'int8'"),
    ],
)
def test_refusals(
    store: Store, tmp_path: Path, site: str, name: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(VitseeError, match=message):
        export(store, site, tmp_path / name, **more)
    assert not list(tmp_path.iterdir())


def test_memory_is_that_of_a_slab(tmp_path: Path) -> None:
    x = np.zeros((512, 7, 1024), np.float32)
    store = write_model(tmp_path / "a.zarr", {"blocks.0.out": x}, slab=16)
    export(store, "blocks.0.out", tmp_path / "warm.npy", tokens="all")
    tracemalloc.start()
    export(store, "blocks.0.out", tmp_path / "x.npy", tokens="all")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 4


def test_the_command(store: Store, tmp_path: Path) -> None:
    words = ["export", str(store.path), "blocks.-1.out"]
    words += ["-o", str(tmp_path / "x.npy"), "--samples", str(tmp_path / "x.csv")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'x.npy'}: 20 x 4\n"
    assert np.load(tmp_path / "x.npy") == pytest.approx(  # the class token by default
        rows(SITES["blocks.1.out"])[:, 0], rel=1e-3, abs=1e-3
    )
    with open(tmp_path / "x.csv") as file:
        listed = list(csv.DictReader(file))
    assert [row["id"] for row in listed] == rows(store.samples.id).tolist()
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1
    assert "exists; give another name, or --force" in again.stderr
    assert CliRunner().invoke(main, [*words, "--force"]).exit_code == 0


# ---------------------------------------------------------------- a stream for training


def as_rows(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for batch in batches for row in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_token_comes_once_in_an_epoch(store: Store, workers: int) -> None:
    data = TokenDataset(store.path, "blocks.0.out", batch_size=7)
    batches = list(DataLoader(data, batch_size=None, num_workers=workers))
    assert sum(map(len, batches)) == data.n_tokens == 20 * 6
    assert all(
        batch.dtype == torch.float32 and batch.shape[1] == data.dim == 4
        for batch in batches
    )
    patches = rows(SITES["blocks.0.out"])[:, 1:].astype(np.float16).astype(np.float32)
    expected = np.array(sorted(as_rows([patches.reshape(-1, 4)])))
    assert np.array(sorted(as_rows(batches))) == pytest.approx(expected, rel=1e-3)


def test_epochs_differ_and_seeds_repeat(store: Store) -> None:
    one, again = (TokenDataset(store, "blocks.0.out", batch_size=16) for _ in range(2))
    first, second = as_rows(one), as_rows(one)
    assert first != second
    assert sorted(first) == sorted(second)
    assert as_rows(again) == first
    in_order = TokenDataset(store, "blocks.0.out", "cls", shuffle=False, batch_size=5)
    assert torch.cat(list(in_order)).numpy() == pytest.approx(
        rows(SITES["blocks.0.out"])[:, 0], rel=1e-3, abs=1e-3
    )


def test_processes_share_the_slabs(store: Store) -> None:
    parts = [
        as_rows(TokenDataset(store, "blocks.0.out", batch_size=9, rank=k, world=2))
        for k in range(2)
    ]
    assert min(map(len, parts)) > 0
    assert sorted(parts[0] + parts[1]) == sorted(
        as_rows(TokenDataset(store, "blocks.0.out"))
    )
    with pytest.raises(VitseeError, match="rank 2 of 2 processes; expected 0 to 1"):
        TokenDataset(store, "blocks.0.out", rank=2, world=2)
    with pytest.raises(VitseeError, match="batches of 0"):
        TokenDataset(store, "blocks.0.out", batch_size=0)


def test_the_example_trains_a_sparse_autoencoder(tmp_path: Path) -> None:
    """Features made of few of 12 directions each: the loss falls well below that of the mean."""
    import runpy

    rng = np.random.default_rng(0)
    directions = rng.normal(size=(12, 8))
    active = (rng.random((64, 7, 12)) < 0.15) * rng.random((64, 7, 12))
    store = write_model(
        tmp_path / "a.zarr", {"blocks.0.out": active @ directions}, slab=16
    )
    example = runpy.run_path(
        str(Path(__file__).parents[1] / "examples/sparse_autoencoder.py")
    )
    model, explained = example["train"](
        open_store(store.path), "blocks.0.out", 24, epochs=60
    )
    assert explained[-1] > 0.8
    assert explained[-1] > explained[0]
    assert model.decoder.weight.shape == (8, 24)

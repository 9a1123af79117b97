"""Gram files: what they hold beside the matrix, whose they are, and what becomes of broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.features import activations
from tests.stores import VIT, write_model, write_sites
from vitsee_core.runtime import machine
from vitsee_core.similarity import (
    Estimator,
    GramOptions,
    Representation,
    cosine,
    hsic,
    pearson,
    products,
    raw_gram,
    summarise,
)
from vitsee_core.similarity.cache import SCRATCH, create_owned, gram_cache, owned_by_none
from vitsee_core.similarity.estimators import InMemory, leave_one_out
from vitsee_core.similarity.gram_file import GramFile, GramView, Header
from vitsee_core.similarity.hsic_sums import bytes_per_matrix, pair_totals
from vitsee_core.similarity.representation import Shift
from vitsee_core.similarity.whole_tiles import Partition
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput

Array = NDArray[Any]
N = 30
SITES = {f"blocks.{i}.out": activations(N, seed=i) + 3 * i for i in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_sites(tmp_path / "a.zarr", SITES)


def compare(store: Store, **kwargs: Any) -> Array:
    sites = [Representation(store, site) for site in store.select(["all"])]
    return summarise(hsic(sites, options=GramOptions(**kwargs))).cka


def folder_of(store: Store) -> Path:
    return store.path.with_name(f"{store.path.name}.grams")


def views(store: Store) -> dict[str, GramView]:
    """Site -> its matrix in the cache, all rows."""
    found = {}
    for path in folder_of(store).glob("*.json"):
        header = Header.load(path.read_bytes())
        assert header is not None
        found[header.key[0]] = GramView(
            GramFile(path.with_suffix(".tiles"), header), header.rows
        )
    return found


def whole(view: GramView) -> Array:
    return view.block(slice(0, view.n), slice(0, view.n))


# Inner products of the features themselves


def shifted(x: Array, c: Array) -> tuple[Array, Shift]:
    centred = x - c
    return centred @ centred.T, Shift(centred @ c, x.mean(1), float(c @ c), x.shape[1])


def test_raw_inner_products_by_hand() -> None:
    x, c = np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([1.0, 2.0])
    gram, shift = shifted(x, c)
    assert gram.tolist() == [[8.0, -4.0], [-4.0, 4.0]]
    assert shift.along.tolist() == [6.0, -4.0] and shift.squared == 5.0
    assert raw_gram(gram, shift).tolist() == [[25.0, 3.0], [3.0, 1.0]]
    assert cosine(gram, shift) == pytest.approx(np.array([[1, 0.6], [0.6, 1]]))
    # (3, 4) rises and (1, 0) falls
    assert pearson(gram, shift) == pytest.approx(np.array([[1.0, -1.0], [-1.0, 1.0]]))


def test_raw_inner_products_in_double_precision() -> None:
    rng = np.random.default_rng(0)
    x, c = rng.normal(2, 1, size=(12, 50)), rng.normal(size=50)
    gram, shift = shifted(x, c)
    assert raw_gram(gram, shift) == pytest.approx(x @ x.T, rel=1e-12)
    units = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert cosine(gram, shift) == pytest.approx(units @ units.T, abs=1e-12)
    assert pearson(gram, shift) == pytest.approx(np.corrcoef(x), abs=1e-12)
    some = np.array([7, 2])
    assert pearson(gram[np.ix_(some, some)], shift.of(some)) == pytest.approx(
        np.corrcoef(x[some]), abs=1e-12
    )


def test_what_has_no_direction_has_no_cosine() -> None:
    x = np.array([[0.0, 0.0], [1.0, 2.0], [5.0, 5.0]])
    gram, shift = shifted(x, np.array([0.5, -0.25]))
    assert np.isnan(cosine(gram, shift)[0]).all() and cosine(gram, shift)[1, 1] == 1
    # the same in all features: nothing to correlate
    assert np.isnan(pearson(gram, shift)[2]).all() and pearson(gram, shift)[1, 1] == 1


def test_the_cache_knows_the_features_themselves(store: Store) -> None:
    compare(store)
    found = views(store)
    for name, values in SITES.items():
        x = values.reshape(N, -1).astype(np.float32).astype(np.float64)
        view = found[name]
        assert np.abs(whole(view) - x @ x.T).max() > 1  # it is of shifted features
        gram = raw_gram(whole(view), view.shift)
        # single precision of the largest
        assert gram == pytest.approx(x @ x.T, abs=1e-6 * (x * x).sum(1).max())
        assert view.shift.n_features == x.shape[1]
        assert view.shift.means == pytest.approx(x.mean(1), abs=1e-6)
        assert pearson(whole(view), view.shift) == pytest.approx(np.corrcoef(x), abs=1e-5)


def test_groups_of_tiles_count_each_row_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitsee_core.similarity.estimators.tile_size", lambda n: 7)
    monkeypatch.setattr(products, "MIN_COLUMNS", 1)
    plan = products.StripPlan.within_memory
    monkeypatch.setattr(
        products.StripPlan,
        "within_memory",
        lambda **a: products.StripPlan(2, min(5, plan(**a).columns), 2),
    )
    compare(store)
    view = views(store)["blocks.2.out"]
    x = SITES["blocks.2.out"].reshape(N, -1)
    assert raw_gram(whole(view), view.shift) == pytest.approx(x @ x.T, rel=1e-5, abs=1e-4)


def test_batches_have_no_inner_products(store: Store, tmp_path: Path) -> None:
    sites = [Representation(store, site) for site in store.select(["all"])]
    hsic(sites, estimator=Estimator("minibatch", 5, 10, 1), options=GramOptions())
    for view in views(store).values():
        with pytest.raises(MissingInput, match="of batches, kept without"):
            _ = view.shift
    within = InMemory(4, lambda: np.zeros((4, 4), np.float32))
    with pytest.raises(MissingInput, match="of single batches or slabs are kept without"):
        _ = within.shift


# The same whatever the threads


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sites = {f"x{i}": rng.normal(1, 1, size=(40, 7, 600)) for i in range(3)}
    monkeypatch.setattr("vitsee_core.similarity.products.GOOD_COLUMNS", 256)
    monkeypatch.setattr("vitsee_core.features.matrix.FeatureMatrix.chunk_columns", 64)
    monkeypatch.setattr("vitsee_core.similarity.estimators.tile_size", lambda n: 16)
    monkeypatch.setattr("vitsee_core.similarity.hsic_sums.MIN_THREADED_WORK", 0)
    monkeypatch.setattr("vitsee_core.similarity.whole_tiles.TERMS", 64)
    monkeypatch.setattr(
        "vitsee_core.similarity.estimate.is_worth_compiling", lambda work: True
    )
    found: list[tuple[Any, list[str]]] = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(machine, "n_cores", lambda n=cores: n)
        store = write_sites(tmp_path / f"{cores}.zarr", sites, dtype="float16")
        value = compare(store)
        headers = [view.file.header for view in views(store).values()]
        assert len(headers) == 3
        files = [repr((h.checksums, h.shift and h.shift.along.tolist())) for h in headers]
        found.append((value, sorted(files)))
    for value, files in found[1:]:
        assert np.array_equal(value, found[0][0]) and files == found[0][1]


def test_a_failing_thread_ends_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: 3)
    monkeypatch.setattr(products, "GOOD_COLUMNS", 4)
    monkeypatch.setattr(products, "MIN_COLUMNS", 1)
    monkeypatch.setattr("vitsee_core.features.matrix.FeatureMatrix.chunk_columns", 4)
    load = products._Pass._load

    def fail(self: Any, k: int, *args: Any) -> Any:
        if k == 2:
            raise RuntimeError("of the third strip")
        return load(self, k, *args)

    monkeypatch.setattr(products._Pass, "_load", fail)
    with pytest.raises(RuntimeError, match="third strip"):
        compare(store)
    assert not list(folder_of(store).iterdir())


# Folders that go, and what others leave


@pytest.fixture
def removing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`removing(folder, times)` makes the folder vanish while matrices are made."""
    made = products.products

    def start(folder: Path, times: int) -> None:
        left = [times]

        def vanish(*args: Any, **kwargs: Any) -> Any:
            for tile in made(*args, **kwargs):
                if left[0]:
                    left[0] -= 1
                    shutil.rmtree(folder)
                yield tile

        monkeypatch.setattr("vitsee_core.similarity.comparison.products", vanish)

    yield start


@pytest.mark.parametrize(("times", "kept"), [(1, 3), (2, 2)])
def test_a_folder_that_goes_meanwhile(
    store: Store, tmp_path: Path, removing: Any, times: int, kept: int, caplog: Any
) -> None:
    want = compare(write_sites(tmp_path / "b.zarr", SITES))
    removing(folder_of(store), times)
    assert np.array_equal(compare(store), want)
    assert caplog.text.count("was removed meanwhile") == times
    assert not list(Path(tempfile.gettempdir()).glob(f"{SCRATCH}{os.getpid()}*"))
    if times == 1:
        assert len(list(folder_of(store).glob("*.json"))) == kept


def test_a_folder_that_goes_before_the_pairs(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    want = compare(store)
    totals = pair_totals
    times = [0]

    def vanish(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        if times[0] == 1:
            shutil.rmtree(folder_of(store))
        return totals(*args, **kwargs)

    monkeypatch.setattr("vitsee_core.similarity.estimators.pair_totals", vanish)
    assert np.array_equal(compare(store), want)
    assert caplog.text.count("is gone (tile 0); it is made again") == 1 and times == [2]


def test_old_age_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with gram_cache(None, False) as mine:
        past = time.time() - 10 * 24 * 3600
        for path in (mine.scratch, *mine.scratch.iterdir()):
            os.utime(path, (past, past))
        with gram_cache(None, False):
            assert mine.scratch.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_dead_left_goes_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(store)
    folder.mkdir()
    living = create_owned(folder / "b.all.x.tiles.partial")
    code = "import sys; from pathlib import Path; from vitsee_core.similarity.cache import *\n"
    code += "import os; [create_owned(Path(p)) for p in sys.argv[1:]]; os._exit(9)"
    scratch = tmp_path / "tmp" / f"{SCRATCH}dead"
    scratch.mkdir(parents=True)
    dead = [folder / "a.all.x.tiles.partial", scratch / "owner"]
    assert subprocess.run([sys.executable, "-c", code, *map(str, dead)]).returncode == 9
    (folder / "a.all.x.json.partial").write_bytes(b"{")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    compare(store)
    assert not scratch.exists()
    assert [p.name for p in folder.glob("*.partial")] == ["b.all.x.tiles.partial"]
    assert not owned_by_none(folder / "b.all.x.tiles.partial")
    os.close(living)
    assert owned_by_none(folder / "b.all.x.tiles.partial")


def test_pipes_are_passed_over(store: Store) -> None:
    want = compare(store)
    for path in list(folder_of(store).iterdir()):
        path.unlink()
        os.mkfifo(path)
    assert np.array_equal(compare(store), want)


def test_other_formats_and_damaged_headers_are_made_again(store: Store) -> None:
    want = compare(store)
    older, moved, cut = sorted(folder_of(store).glob("*.json"))
    fields = json.loads(older.read_bytes())
    del fields["digest"], fields["shift"]
    older.write_text(json.dumps({**fields, "format": 1}))
    text = moved.read_text()
    along = json.loads(text)["shift"]["squared"]
    moved.write_text(text.replace(repr(along), repr(along + 1)))
    cut.write_bytes(cut.read_bytes()[:-40])
    assert np.array_equal(compare(store), want)
    assert not older.exists() and not older.with_suffix(".tiles").exists()
    found = [Header.load(path.read_bytes()) for path in folder_of(store).glob("*.json")]
    assert sum(header is not None for header in found) == 3


def test_headers_survive_anything(store: Store) -> None:
    """Every bit of a header, and fields of other types: a header that says the same, or none."""
    compare(store)
    text = next(folder_of(store).glob("*.json")).read_bytes()
    whole_header = Header.load(text)
    assert whole_header is not None
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(text), 300):
        data = bytearray(text)
        data[place // 8] ^= 1 << place % 8
        found = Header.load(bytes(data))
        assert found is None or found.dump() == whole_header.dump()
    for other in (
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": 3, "digest": 0}',
        b"\xff",
    ):
        assert Header.load(other) is None


# Starts


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cka", "cka-heads"])
def test_small_and_cached_comparisons_need_no_torch(tmp_path: Path, command: str) -> None:
    """Nor any other library that takes long to be imported."""
    distances = np.arange(N * 2 * 2.0).reshape(N, 2, 2)
    sites: dict[str, Any] = {
        "blocks.0.attn.heads": activations(N, 6),
        "blocks.0.out": activations(N, 4, 1),
        "blocks.1.out": activations(N, 4, 2),
    }
    a = write_model(tmp_path / "a.zarr", sites, distances=distances)
    b = write_model(tmp_path / "b.zarr", sites)
    slow = ("torch", "timm", "matplotlib", "sklearn", "PIL")
    code = "import sys; from vitsee_cli.main import main; main(standalone_mode=False); "
    code += f"print([m for m in {slow} if m in sys.modules], file=sys.stderr)"
    for _ in range(2):  # making the Gram matrices, then from the cache
        arguments = [sys.executable, "-c", code, command, str(a.path), str(b.path)]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]" and done.stdout.startswith("store_a")
        assert list(folder_of(a).glob("*.json"))


# Memory


@pytest.mark.parametrize(("n", "megabytes"), [(1000, 128), (5000, 4000), (50_000, 512)])
def test_what_a_pass_plans_fits(store: Store, n: int, megabytes: int) -> None:
    memory, side = megabytes * 10**6, min(n, 1000)
    edges = [slice(at, at + side) for at in range(0, n, side)]
    tiles_ = [products.GramTile(a, b) for k, a in enumerate(edges) for b in edges[k:]]
    features = Representation(store, store.select(["all"])[0]).features
    plan = products.StripPlan.within_memory(features, n, tiles_, memory, 4)
    sums = plan.at_once * side * side * 8
    pairs = [(a, b) for a in range(len(edges)) for b in range(a, len(edges))]
    groups = [pairs[at : at + plan.at_once] for at in range(0, len(pairs), plan.at_once)]
    rows = max(side * len({edge for pair in group for edge in pair}) for group in groups)
    a_lane = rows * plan.columns * 4 + side * side * 4 + features.chunk_bytes
    assert 0 < sums + plan.lanes * a_lane <= memory * 3 / 4
    assert plan.at_once == 1 or sums > memory / 4  # and uses it


def test_strips_are_as_wide_as_the_rows_of_one_group_allow(tmp_path: Path) -> None:
    """Not as those of all images: then a million of them are refused, or read chunks many times."""
    x = np.zeros((4, VIT.n_tokens, 1024), np.float32)
    store = write_sites(tmp_path / "wide.zarr", {"rows": x})
    features = Representation(store, store.site("rows")).features
    batches_ = [np.arange(at, at + 1024) for at in range(0, 1_000_000 - 1024, 1024)]
    tiles_ = [products.GramTile(places, places) for places in batches_]
    plan = products.StripPlan.within_memory(features, 1_000_000, tiles_, 512 * 10**6, 4)
    assert plan.at_once == 22
    assert (
        plan.columns > 700
    )  # 22 batches of 1024 rows, two lanes in 192 MB; of a million rows 23


@pytest.mark.slow
def test_a_jackknife_holds_one_block_less_at_a_time() -> None:
    n, rng = 1500, np.random.default_rng(0)
    grams = [x @ x.T for x in rng.normal(size=(4, n, 3)).astype(np.float32)]
    matrices = [InMemory(n, lambda gram=gram: gram) for gram in grams]  # type: ignore[misc]
    partition = Partition(np.arange(n) * 20 // n, 20, crossing=True)
    tracemalloc.start()
    found = leave_one_out(
        matrices, None, tile=64, partition=partition, biased=False, device="cpu"
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 21
    # what the products of a piece and its bookkeeping take beside it
    assert peak < 4 * bytes_per_matrix(n, [partition], 64) + 500_000

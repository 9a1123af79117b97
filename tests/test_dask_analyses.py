"""Every analysis that spreads its work gives one process's numbers, and moves little."""

from __future__ import annotations

import importlib
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.clusters import two_workers
from tests.extractions import VIT as VIT_MODEL
from tests.extractions import extracted, plant_images
from tests.stores import VIT, write_labelled
from tests.tables import equal
from tests.test_segments import by_kind
from vitsee_cli.main import main
from vitsee_core.analyses import (
    cka,
    cluster,
    dense_probe,
    knn,
    localize,
    probe,
    retrieve,
    saliency,
    similarity,
    spatial,
    spectrum,
)
from vitsee_core.analyses.similarity import comparing
from vitsee_core.runtime.dask_map import DaskMap
from vitsee_core.runtime.progress import Tally
from vitsee_core.similarity import comparison
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.segments import Segmentation
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError

pytest.importorskip("distributed")

pytestmark = pytest.mark.slow  # workers are processes

N, DIM = 96, 40
# What one site's activations take: whatever went through the scheduler is far below it.
SITE_BYTES = N * VIT.n_tokens * DIM * 4
Run = Callable[..., Table]


@pytest.fixture(scope="module")
def two() -> Iterator[DaskMap]:
    with two_workers() as made:
        yield made


def acts(seed: int, n: int = N, drift: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, VIT.n_tokens, DIM)).astype(np.float32)
    base[:, 0] += drift * np.eye(DIM, dtype=np.float32)[np.arange(n) % 3]
    noise = rng.standard_normal((3, n, VIT.n_tokens, DIM)).astype(np.float32)
    return {f"blocks.{k}.out": base + (k + 1) * part for k, part in enumerate(noise)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("dask") / "train.zarr"
    pixels = np.random.default_rng(3).standard_normal((N, 3, 32, 48)).astype(np.float32)
    how = {"mean": [0.5] * 3, "std": [0.5] * 3}
    labels = np.arange(N) % 3
    return write_labelled(path, acts(0), labels, layout=VIT, pixels=pixels, transform=how)


@pytest.fixture(scope="module")
def test(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("dask") / "test.zarr"
    return write_labelled(
        path, acts(1, 60), np.arange(60) % 3, layout=VIT, hash_offset=1000
    )


def check(
    two: DaskMap, run: Callable[..., Table], to: float = 0.0, most: int = SITE_BYTES
) -> None:
    """What `run` gives here, to the bit (or within `to`) what it gives by workers; and what moved
    is little."""
    here = run()
    sent, received = two.sent, two.received
    there = run(map=two)
    if to:
        numbers = [name for name in here.written.columns if here[name].dtype.kind == "f"]
        assert equal(here, there, *numbers)
        for name in numbers:
            np.testing.assert_allclose(there[name], here[name], rtol=0, atol=to)
    else:
        assert equal(here, there)
    assert two.sent > sent, "nothing was done by the workers"
    assert two.sent + two.received - sent - received < most


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (probe.run, {"shots": (5,)}),
        (probe.run, {"shots": (5,), "tokens": ("each",)}),
        (probe.run, {"shots": (5,), "tokens": ("all",), "baselines": ("random",)}),
        (knn.run, {"ks": (3,), "baselines": ("random",)}),
        (cluster.run, {}),
        (spectrum.run, {}),
        (spectrum.run, {"tokens": "patches"}),
        (retrieve.run, {}),
        (cka.run, {"no_cache": True}),
    ],
)
def test_work_on_sites(
    two: DaskMap, store: Store, test: Store, run: Run, options: dict[str, Any]
) -> None:
    stores = [store, test] if run in (probe.run, knn.run) else [store]
    # Of retrieve a value of each query without each block of images comes back, too.
    most = 3 * SITE_BYTES if run is retrieve.run else SITE_BYTES
    check(two, partial(run, *stores, **options), most=most)


@pytest.mark.parametrize("summary", [None, "site"])
def test_localize(two: DaskMap, store: Store, summary: str | None) -> None:
    """Each site alone where one process multiplies several together: in other sums of float32."""
    run = partial(localize.run, store, sites=("blocks",), summary=summary)
    check(two, run, to=1e-5)


@pytest.mark.parametrize(
    "how", [{}, {"estimator": "minibatch", "batch": 16, "repeats": 2}]
)
def test_gram_matrices(
    two: DaskMap, store: Store, tmp_path: Path, how: dict[str, Any]
) -> None:
    folders = iter((tmp_path / "here", tmp_path / "there"))

    def run(**more: Any) -> Table:
        return cka.run(store, cache=next(folders), **how, **more)

    check(two, run)
    here, there = (
        sorted(p.name.split("-")[0] for p in tmp_path.glob(f"{w}/*.tiles"))
        for w in ("here", "there")
    )
    assert here == there and len(there) == 3


def test_similarity(two: DaskMap, store: Store, tmp_path: Path) -> None:
    folders = iter((tmp_path / "here", tmp_path / "there"))
    check(
        two,
        lambda **more: similarity.run(
            store,
            metrics=("mutual-knn", "rsa"),
            calibrate=19,
            cache=next(folders),
            **more,
        ),
    )


@pytest.mark.parametrize("choice", [{}, {"segments": 7}])
def test_segments(two: DaskMap, tmp_path: Path, choice: dict[str, Any]) -> None:
    store, path = by_kind(tmp_path, n=40)
    masks = Segmentation(path, **choice)
    check(two, lambda **more: cluster.run(store, masks=masks, n_seeds=1, **more))
    assert len(pickle.dumps(masks.open())) < 500 < path.stat().st_size, (
        "workers read it themselves"
    )


def test_masks(two: DaskMap, whole: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in whole.samples.file[whole.valid]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((rng.random((50, 60)) < 0.6).astype(np.uint8)).save(path)
    of_pixels = partial(dense_probe.run, holdout=0.3, l2_relative=[1.0])
    by_sgd = partial(dense_probe.run, holdout=0.3, solver="sgd", steps=2)
    runs: tuple[Run, ...] = (saliency.run, spatial.run, of_pixels, by_sgd)
    for run in runs:
        sent = two.sent
        assert equal(run(whole, masks=tmp_path), run(whole, masks=tmp_path, map=two))
        assert two.sent > sent


def test_relative_paths_of_masks(
    two: DaskMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have another working folder; the sidecar has the path as it was given."""
    by_kind(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = [
        "cluster",
        "a.zarr",
        "--masks",
        "a.json",
        "--seeds",
        "1",
        "-o",
        "a.csv",
        "--dask",
    ]
    result = CliRunner().invoke(main, [*command, two.client.scheduler.address])
    assert result.exit_code == 0, result.stderr
    sidecar = json.loads(Path("a.csv.json").read_text())
    assert sidecar["parameters"]["masks"]["masks"] == ["a.json"]


class Three:
    """`pickled` by three processes of this machine, or of others; keeps what it was given."""

    def __init__(self, local: int) -> None:
        self.local, self.items = local, list[Any]()

    def n_threads(self) -> int:
        return 3

    def __call__(self, function: Any, items: Any) -> Iterator[Any]:
        items = list(items)
        self.items += items
        yield from pickled(function, items)


CALIBRATED: dict[str, Any] = {"images": 40, "calibrate": 19, "cache": Path("grams")}


def test_permutations(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every measure, to the bit, from Gram matrices at a relative path."""
    monkeypatch.chdir(tmp_path)
    here = similarity.run(store, metrics=similarity.MEASURES, **CALIBRATED)
    for local in (3, 0):
        three = Three(local)
        there = similarity.run(
            store, metrics=similarity.MEASURES, map=three, **CALIBRATED
        )
        assert equal(here, there) and np.isfinite(here["p"]).all()
        ranges = [(one.start, one.stop) for one in three.items]
        assert ranges == len(similarity.MEASURES) * [(0, 6), (6, 12), (12, 19)]


def test_permutations_whose_states_do_not_fit_the_memory(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any measure: they stay here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "STATES_SHARE", 1e-9)
    how = {
        "metrics": similarity.MEASURES,
        "sites": ("blocks.0.out", "blocks.2.out"),
    } | CALIBRATED
    here = similarity.run(store, **how)
    for local in (3, 0):
        three = Three(local)
        there = similarity.run(store, map=three, **how)
        assert equal(here, there) and np.isfinite(here["p"]).all() and not three.items


def test_permutations_where_workers_have_no_files(store: Store, tmp_path: Path) -> None:
    how: dict[str, Any] = {"metrics": ("rsa",), "images": 40, "calibrate": 19}
    far = Three(0)
    here = similarity.run(store, no_cache=True, **how)
    assert (
        equal(here, similarity.run(store, no_cache=True, map=far, **how))
        and not far.items
    )
    similarity.run(store, cache=tmp_path / "a", **how)

    def elsewhere(function: Any, items: Any) -> Iterator[Any]:
        if items := list(items):
            (tmp_path / "a").rename(tmp_path / "b")
        yield from pickled(function, items)

    with pytest.raises(
        VitseeError, match="not on a worker's disk: --dask needs a --cache DIR"
    ):
        similarity.run(store, cache=tmp_path / "a", map=elsewhere, **how)


def test_workers_with_another_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes a Gram matrix where this machine does not see it."""
    monkeypatch.setattr(comparison, "VISIBLE_SECONDS", 0.0)

    def elsewhere(function: Any, items: Any) -> Iterator[Any]:
        for item in items:
            path, tally = function(item)
            path.rename(tmp_path / path.name)
            yield path, tally

    with pytest.raises(
        VitseeError, match="--dask needs a --cache DIR that all machines share"
    ):
        cka.run(store, cache=tmp_path / "cache", map=elsewhere)


def test_a_pair_of_stores(two: DaskMap, store: Store, tmp_path: Path) -> None:
    other = write_labelled(tmp_path / "b.zarr", acts(5), np.arange(N) % 3, layout=VIT)
    folders = iter((tmp_path / "here", tmp_path / "there"))
    check(two, lambda **more: cka.run(store, other, cache=next(folders), **more))


# ------------------------------------------------------------------------- every kind of analysis


GRAMS = ("cka", "effect", "similarity")
PLAIN = (
    *(
        "attn_dist",
        "cka",
        "effect",
        "erf",
        "head_types",
        "lens",
        "localize",
        "logit_attribution",
    ),
    *("normratio", "norms", "pca", "retrieve", "similarity", "spatial", "spectrum"),
)


class Locked(Tally):
    """Progress that cannot be pickled, as the terminal's."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def pickled(function: Any, items: Any) -> Iterator[Any]:
    """A map that sends everything as DaskMap does, and stays here."""
    work = cloudpickle.dumps(function)
    for item in items:
        again = pickle.loads(work)(pickle.loads(pickle.dumps(item)))
        yield pickle.loads(pickle.dumps(again))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with everything that analyses read."""
    folder = tmp_path_factory.mktemp("whole")
    plant_images(folder / "photos", 12)
    how = [
        "--slab",
        4,
        "--device",
        "cpu",
        "--inputs",
        "--attention",
        "rows",
        "--head-weights",
    ]
    how += ["--sites", "all", "--erf", 4, "--model-arg", "num_classes=2"]
    extracted(*VIT_MODEL, "--data", folder / "photos", *how, "-o", folder / "a.zarr")
    return open_store(folder / "a.zarr")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in PLAIN),
        *[
            ("attn_map", {"kind": "aligned"}),
            ("cluster", {"n_seeds": 1}),
            ("probe", {"holdout": 0.5}),
        ],
    ],
)
def test_work_and_results_travel(
    whole: Store, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    run = importlib.import_module(f"vitsee_core.analyses.{name}").run
    seen, expected = Locked(), Locked()
    caches = [{"cache": tmp_path / w} if name in GRAMS else {} for w in ("here", "there")]
    stores = [whole] * (2 if name == "effect" else 1)
    here = run(*stores, progress=expected, **caches[0], **options)
    there = run(*stores, map=pickled, progress=seen, **caches[1], **options)
    numbers = [n for n in here.written.columns if here[n].dtype.kind == "f"]
    assert equal(here, there, *(numbers if name == "localize" else ()))
    if name != "localize":  # sites are counted there, and here tiles of images
        assert seen.count == expected.count

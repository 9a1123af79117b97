"""Measures of similarity and statistics of layers, all the way from a store to a table's cell: on
features whose answer is known, and on the demo's ViT against what numpy, scipy and scikit-learn
say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import kurtosis, skew
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors

import vitsee
from tests import reference_measures as reference
from tests.extractions import extracted
from tests.stores import write_model
from vitsee_stores import Store, TokenLayout, open_store

Array = NDArray[Any]
N, GRID = 160, (9, 9)
SQUARE = TokenLayout((), GRID, stride_px=(8.0, 8.0))


def with_spectrum(values: Array, dim: int, seed: int = 0) -> Array:
    """(N, dim) of mean 0 whose singular values are exactly these, in random directions."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(N, len(values)))
    left, _ = np.linalg.qr(left - left.mean(0))
    right, _ = np.linalg.qr(rng.normal(size=(dim, len(values))))
    return np.asarray((left * values) @ right.T * 10)


def patches(kind: str) -> Array:
    """(4, 81, dim): `alike`, `apart` (one direction each, the same in all images), `outlier` (one
    of norm 200 among norms of 5)."""
    if kind == "alike":
        return np.broadcast_to([3.0, 4.0], (4, 81, 2)).copy()
    if kind == "apart":
        return np.broadcast_to(np.eye(81), (4, 81, 81)).copy()
    x = np.broadcast_to([3.0, 4.0], (4, 81, 2)).copy()
    x[:, 17] = [0, 200]
    return x


def turned(x: Array) -> Array:
    """The same features in other axes, larger and elsewhere."""
    q, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(x.shape[1], x.shape[1])))
    return np.asarray(3 * x @ q)


EQUAL = np.ones(7)
LAW = np.arange(1.0, 121) ** -0.65  # eigenvalues fall as rank^-1.3
VECTORS: dict[str, Callable[[], Array]] = {
    "seven equal directions": lambda: with_spectrum(EQUAL, 40),
    "the same, 1000 elsewhere": lambda: with_spectrum(EQUAL, 40) + 1000 * np.eye(40)[0],
    "a power law": lambda: with_spectrum(LAW, 120),
    "one direction": lambda: (
        np.abs(with_spectrum(np.ones(1), 1)) * np.array([[1.0, 2.0]])
    ),
}
# analysis, features, metric, answer, tolerance (of float32 stores and float16 none)
LAYERS: list[tuple[str, str, str, float, float]] = [
    ("spectrum", "seven equal directions", "rankme", 7, 1e-5),
    ("spectrum", "seven equal directions", "effective_rank", 7, 1e-5),
    # a constant of 1000 beside singular values of 10: entropy of (12649, 7 times 10), exp 1.047
    ("spectrum", "the same, 1000 elsewhere", "rankme", 1.0469, 2e-3),
    ("spectrum", "the same, 1000 elsewhere", "effective_rank", 7, 1e-3),
    ("spectrum", "a power law", "alpha", 1.3, 1e-5),
    ("spectrum", "one direction", "anisotropy", 1, 1e-6),
    ("spectrum", "one direction", "rankme", 1, 1e-3),
    ("norms", "alike", "norm", 5, 1e-6),
    ("norms", "alike", "outlier_share", 0, 0),
    ("norms", "alike", "neighbour_cos", 1, 1e-6),
    ("norms", "outlier", "outlier_share", 1 / 81, 1e-9),
    ("norms", "outlier", "norm_median", 5, 1e-6),
    ("norms", "outlier", "norm", (80 * 5 + 200) / 81, 1e-5),
    ("norms", "outlier", "massive_top1", 200, 1e-6),
    ("norms", "outlier", "massive_ratio", 200 / 3.5, 1e-6),  # 0, 80 of 3, 80 of 4, 200
    ("spatial", "alike", "mean_cos", 1, 1e-6),
    ("spatial", "alike", "rmsc", 0, 1e-3),
    ("spatial", "alike", "lds", 0, 1e-6),
    ("spatial", "alike", "cds", 0, 1e-6),
    ("spatial", "apart", "mean_cos", 0, 1e-6),
    ("spatial", "apart", "rmsc", math.sqrt(80 / 81), 1e-6),
    ("spatial", "apart", "share_position", 1, 1e-6),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("analysis", "features", "metric", "answer", "tolerance"), LAYERS
)
def test_layers(
    analysis: str,
    features: str,
    metric: str,
    answer: float,
    tolerance: float,
    tmp_path: Path,
) -> None:
    if features in VECTORS:
        store = write_model(tmp_path / "a.zarr", {"pooled": VECTORS[features]()})
        table = vitsee.spectrum(store, sites=["pooled"], metrics=[metric])
    else:
        store = write_model(
            tmp_path / "a.zarr", {"blocks.0.out": patches(features)}, layout=SQUARE
        )
        table = getattr(vitsee, analysis)(store, metrics=[metric])
    rows = table.filter(metric=metric)
    if "row" in table.frame.columns:  # of all patches, not of each
        patches_or_none = pl.col("token").is_null() | (pl.col("token") == "patches")
        rows = rows.filter(pl.col("row").is_null(), patches_or_none)
    assert len(rows) == 1
    assert rows["value"][0] == pytest.approx(answer, abs=tolerance)


ALIKE: dict[str, float] = {
    "mutual-knn": 1, "cknna": 1, "rsa": 1, "procrustes": 1, "svcca": 1, "gulp": 0, "ridge-r2": 1,
    "cka": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("measure", ALIKE)
def test_features_in_other_axes_are_alike(measure: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 12)) * np.arange(1, 13)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": turned(x)})
    table = vitsee.similarity(
        store, metrics=[measure], sites_a=["pooled"], sites_b=["logits"], rdm="euclidean",
        no_cache=True,
    )  # fmt: skip
    # float32 features and Gram matrices; a ridge of 1e-6 leaves a part in 1e5
    assert table["value"][0] == pytest.approx(ALIKE[measure], abs=2e-4)


# ---------------------------------------------------------------- the demo's model

IMAGES = 130


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("demo") / "vit.zarr"
    options = ["--images", str(IMAGES), "--dtype", "float32", "--attention", "none"]
    extracted("demo:vit", "--data", "demo:test", *options, "-o", path)
    return open_store(path)


def rankme(x: Array) -> float:
    """Garrido et al. 2023, eq. 1: of singular values."""
    s = np.linalg.svd(x, compute_uv=False)[: min(x.shape)]
    p = s[s > 1e-9 * s[0]] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def participation(x: Array) -> float:
    """(tr C)^2 over the squared norm of the U-centred Gram matrix (Szekely & Rizzo 2014)."""
    n, y = len(x), x - x.mean(0)
    u = y @ y.T
    np.fill_diagonal(u, 0)
    rows, total = u.sum(1), u.sum()
    u = u - rows[:, None] / (n - 2) - rows / (n - 2) + total / ((n - 1) * (n - 2))
    np.fill_diagonal(u, 0)
    return float(((y**2).sum() / (n - 1)) ** 2 / ((u**2).sum() / (n * (n - 3))))


def anisotropy(x: Array) -> float:
    return float(cosine_similarity(x)[np.triu_indices(len(x), 1)].mean())


def two_nearest(x: Array) -> float:
    """Facco et al. 2017: the slope through the origin of -log(1 - F) on log(r2 / r1)."""
    far = NearestNeighbors(n_neighbors=3).fit(x).kneighbors(x)[0]
    ratio = np.sort(far[:, 2] / far[:, 1])
    kept = int(0.9 * len(ratio))
    a, b = np.log(ratio), -np.log(1 - np.arange(1, kept + 1) / len(ratio))
    return float(np.linalg.lstsq(a[:kept, None], b, rcond=None)[0][0])


def bimodality(x: Array) -> float:
    logs = np.log(np.linalg.norm(x, axis=-1)).ravel()
    return float((skew(logs) ** 2 + 1) / kurtosis(logs, fisher=False))


def by_distance(x: Array) -> tuple[Array, Array]:
    """Cosines of all pairs of patches of each image, and their Manhattan distances."""
    side = math.isqrt(x.shape[1])
    cells = np.array([(i, j) for i in range(side) for j in range(side)])
    upper = np.triu_indices(len(cells), 1)
    return (
        np.stack([cosine_similarity(one)[upper] for one in x]),
        cdist(cells, cells, "cityblock")[upper],
    )


def lds(x: Array) -> float:
    cosines, far = by_distance(x)
    return float((cosines[:, far == 1].mean(1) - cosines[:, far >= 6].mean(1)).mean())


def cds(x: Array) -> float:
    cosines, far = by_distance(x)
    means = np.stack([cosines[:, far == d].mean(1) for d in range(1, 9)])
    return float(-np.polyfit(range(1, 9), means, 1)[0].mean())


def rmsc(x: Array) -> float:
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return float(np.sqrt(unit.var(1).sum(-1)).mean())


def fourier_high(x: Array) -> float:
    """Park et al. 2023: the diagonal from the middle of the shifted spectrum to its end."""
    side = math.isqrt(x.shape[1])
    maps = x.reshape(len(x), side, side, -1)
    logs = np.log(
        np.abs(np.fft.fftshift(np.fft.fft2(maps, axes=(1, 2)), axes=(1, 2))) + 1e-6
    )
    diagonal = logs.mean((0, 3)).diagonal()[side // 2 :]
    return float(diagonal[-1] - diagonal[0])


def share_position(x: Array) -> float:
    total = ((x - x.mean((0, 1))) ** 2).sum()
    return float(len(x) * ((x.mean(0) - x.mean((0, 1))) ** 2).sum() / total)


# analysis, metric, of the class token or of the patches, tolerance (relative; float32 in the store)
DEMO: list[tuple[str, str, str, Callable[[Array], float], float]] = [
    ("spectrum", "rankme", "cls", rankme, 1e-5),
    ("spectrum", "effective_rank", "cls", lambda x: rankme(x - x.mean(0)), 1e-5),
    ("spectrum", "participation_ratio", "cls", participation, 1e-8),
    ("spectrum", "anisotropy", "cls", anisotropy, 1e-5),
    ("spectrum", "twonn", "cls", two_nearest, 1e-5),
    (
        "norms",
        "norm",
        "patches",
        lambda x: float(np.linalg.norm(x, axis=-1).mean()),
        1e-5,
    ),
    ("norms", "bimodality", "patches", bimodality, 1e-4),
    ("spatial", "lds", "patches", lds, 1e-5),
    ("spatial", "cds", "patches", cds, 1e-5),
    ("spatial", "rmsc", "patches", rmsc, 1e-5),
    ("spatial", "fourier_high", "patches", fourier_high, 1e-5),
    ("spatial", "share_position", "patches", share_position, 1e-5),
]


@pytest.mark.parametrize("site", ["blocks.0.out", "blocks.5.out"])
@pytest.mark.parametrize(
    ("analysis", "metric", "tokens", "other", "tolerance"),
    DEMO,
    ids=[row[1] for row in DEMO],
)
def test_the_demos_layers(
    analysis: str, metric: str, tokens: str, other: Callable[[Array], float], tolerance: float,
    site: str, demo: Store,
) -> None:  # fmt: skip
    if tokens == "cls":
        x = demo.pooled(site, "cls")[:].astype(np.float64)
    else:
        x = demo.acts(site, "patches")[:].astype(np.float64).reshape(IMAGES, 64, -1)
    table = getattr(vitsee, analysis)(demo, sites=[site], metrics=[metric])
    rows = table.filter(metric=metric)
    if analysis == "norms":
        rows = rows.filter(token="patches")
    assert len(rows) == 1
    assert rows["value"][0] == pytest.approx(other(x), rel=tolerance)


MEASURED: dict[str, Callable[[Array, Array], float]] = {
    "mutual-knn": lambda x, y: reference.mutual_knn(x, y, 10),
    "cknna": lambda x, y: reference.cknna(x, y, 10),
    "rsa": lambda x, y: reference.rsa(x, y, "pearson"),
    "procrustes": reference.procrustes,
    "svcca": lambda x, y: reference.svcca(x, y, 0.99),
    "gulp": lambda x, y: reference.gulp(x, y, 0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("measure", MEASURED)
def test_the_demos_similarities(measure: str, demo: Store) -> None:
    sites = ["blocks.1.out", "blocks.4.out"]
    x, y = (demo.pooled(site, "cls")[:].astype(np.float64) for site in sites)
    table = vitsee.similarity(
        demo,
        metrics=[measure],
        sites_a=sites[:1],
        sites_b=sites[1:],
        tokens="cls",
        no_cache=True,
    )
    assert table["value"][0] == pytest.approx(MEASURED[measure](x, y), abs=2e-4)

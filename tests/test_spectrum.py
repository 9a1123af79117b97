"""Spectra and neural collapse: against hand, loops and known samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.stores import write_labelled, write_sites
from vitsee_core.analyses.spectrum import plot, run
from vitsee_core.analyses.spectrum.measures import (
    TwoNearest,
    collapse,
    halves,
    nearest_mean_disagrees,
)
from vitsee_core.analyses.spectrum.site_spectra import METRICS, OF_CLASSES, ClassMeasures
from vitsee_core.features import choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.covariance import (
    CovarianceSums,
    Spectrum,
    block_sums,
    entropy_rank,
    power_law,
    total,
)
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.tables.metrics import depends_on_size
from vitsee_stores import TokenLayout
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]


def features(n: int = 40, dim: int = 6, seed: int = 0) -> Array:
    """Of unequal channels and a mean that is not 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dim)) * np.exp(-np.arange(dim) / 2) + np.arange(dim)
    return np.asarray(x, np.float32).astype(np.float64)


# ---------------------------------------------------------------- oracles


def entropy_of(singular: Array) -> float:
    p = [float(s / singular.sum()) for s in singular if s > 0]
    return math.exp(-math.fsum(q * math.log(q) for q in p))


def loop_participation(x: Array) -> float:
    """(tr C)^2 over Song's HSIC_1 from the Gram matrix without its diagonal."""
    n = len(x)
    y = x - x.mean(0)
    gram = y @ y.T
    trace = float(np.trace(gram)) / (n - 1)
    np.fill_diagonal(gram, 0)
    squares, entries = float((gram * gram).sum()), float(gram.sum())
    rows = float((gram @ gram).sum())
    hsic = (squares + entries**2 / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)) / (
        n * (n - 3)
    )
    return trace**2 / hsic


def loop_anisotropy(x: Array) -> float:
    units = [row / np.linalg.norm(row) for row in x]
    pairs = [float(a @ b) for i, a in enumerate(units) for b in units[:i]]
    return math.fsum(pairs) / len(pairs)


def loop_twonn(x: Array) -> float:
    ratios = []
    for i, row in enumerate(x):
        near = sorted(
            float(np.linalg.norm(row - other)) for j, other in enumerate(x) if j != i
        )
        ratios.append(near[1] / near[0])
    ratios.sort()
    n = len(ratios)
    kept = [
        (math.log(mu), -math.log(1 - i / n))
        for i, mu in enumerate(ratios[: int(0.9 * n)], 1)
    ]
    return math.fsum(a * b for a, b in kept) / math.fsum(a * a for a, _ in kept)


def loop_collapse(x: Array, labels: Array) -> dict[str, float]:
    names = sorted(set(labels.tolist()))
    c = len(names)
    groups = [x[labels == name] for name in names]
    means = [group.mean(0) for group in groups]
    centre = sum(means) / c
    within = sum(
        np.outer(v - m, v - m) for g, m in zip(groups, means, strict=True) for v in g
    )
    between = sum(np.outer(m - centre, m - centre) for m in means) / c
    # the pseudoinverse of rank C - 1
    inverse = np.linalg.pinv(between, rcond=1e-9, hermitian=True)
    variance = [
        float(((g - m) ** 2).sum()) / (len(g) - 1)
        for g, m in zip(groups, means, strict=True)
    ]
    ratios, angles = [], []
    for i in range(c):
        for j in range(i):
            distance = float(((means[i] - means[j]) ** 2).sum())
            distance -= variance[i] / len(groups[i]) + variance[j] / len(groups[j])
            ratios.append((variance[i] + variance[j]) / (2 * distance))
            a, b = means[i] - centre, means[j] - centre
            angles.append(abs(a @ b / math.sqrt((a @ a) * (b @ b)) + 1 / (c - 1)))
    norms = [math.sqrt((m - centre) @ (m - centre)) for m in means]
    mean = math.fsum(norms) / c
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in norms) / c)
    return {
        "nc1": float(np.trace(within / len(x) @ inverse)) / c,
        "cdnv": math.fsum(ratios) / len(ratios),
        "nc2_norms": spread / mean,
        "nc2_angles": math.fsum(angles) / len(angles),
    }


# ---------------------------------------------------------------- pure functions


def test_by_hand() -> None:
    # Singular values 3 and 1: p = 3/4, 1/4; entropy 0.56234, exp 1.75477.
    assert entropy_rank(np.array([9.0, 1.0, 0.0])) == pytest.approx(
        1.7547653506033158, rel=1e-12
    )
    # Three examples on a line, 0, 2, 4: centred one direction; about 0 one too.
    line = Spectrum.from_examples(np.array([[0.0], [2.0], [4.0]]))
    assert line.metrics()["rankme"] == line.metrics()["effective_rank"] == 1
    # (1, 0), (0, 1), (-1, 0): cosines 0, 0, -1.
    cross = Spectrum.from_examples(np.array([[1.0, 0], [0, 1], [-1, 0]]))
    assert cross.metrics()["anisotropy"] == pytest.approx(-1 / 3, rel=1e-15)
    # Eigenvalues 7 rank^-1.5.
    assert power_law(7 * np.arange(1, 201.0) ** -1.5) == pytest.approx(1.5, rel=1e-12)
    # 0, 1, 3, 4 on a line: r2 / r1 = 3, 2, 2, 3; of four, floor(3.6) are kept: log 2, 2, 3 against
    # log 4/3, log 2, log 4.
    x, l2, l3 = np.array([[0.0], [1], [3], [4]]), math.log(2), math.log(3)
    expected = (l2 * math.log(4 / 3) + l2 * l2 + l3 * 2 * l2) / (2 * l2**2 + l3**2)
    found = TwoNearest(x, np.arange(4)).dimension(np.ones(4, bool))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(40, 6), (6, 40), (7, 7)])
def test_spectra_of_sums_and_of_examples(shape: tuple[int, int]) -> None:
    x = features(*shape)
    parts = [CovarianceSums.from_examples(piece, x[0]) for piece in np.array_split(x, 3)]
    n, dim = shape
    raw = np.linalg.svd(x, compute_uv=False)[: min(n, dim)]
    centred = np.linalg.svd(x - x.mean(0), compute_uv=False)[: min(n - 1, dim)]
    expected = {
        "rankme": entropy_of(raw),
        "effective_rank": entropy_of(centred),
        "participation_ratio": loop_participation(x),
        "anisotropy": loop_anisotropy(x),
    }
    for spectrum in (Spectrum.from_sums(total(parts)), Spectrum.from_examples(x)):
        found = spectrum.metrics()
        assert math.isnan(found["alpha"])
        for name, value in expected.items():
            # roots of eigenvalues that rounding leaves near 0 are off by 1e-8 of the largest
            assert found[name] == pytest.approx(value, rel=2e-6), name


@pytest.mark.parametrize(("n", "dim"), [(1, 1), (7, 3), (1100, 130)])
def test_sums_are_the_loops(n: int, dim: int) -> None:
    """Over several pieces of `ROWS_AT_ONCE`, an example without a length among them."""
    x, shift = features(n, dim), np.full(dim, 0.5)
    x[n // 2] = 0
    found = CovarianceSums.from_examples(x.astype(np.float32), shift)
    second, units = np.zeros((dim, dim)), np.zeros(dim)
    for row in x:
        second += np.outer(row - shift, row - shift)
        units += row / np.linalg.norm(row) if row.any() else 0
    assert np.allclose(found.second, second, rtol=1e-12, atol=1e-12)
    assert np.array_equal(found.second, found.second.T)
    assert np.allclose(found.directions, units, rtol=1e-12, atol=1e-12)
    assert (found.n, found.n_nonzero) == (n, n - 1)


def test_sums_of_a_store_do_not_depend_on_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(1, 2, size=(30, 6, 9)).astype(np.float16)
    layout = TokenLayout((), (2, 3), stride_px=(16.0, 16.0))
    store = write_sites(
        tmp_path / "a.zarr", {"x": x}, layout=layout, slab=8, dtype="float16"
    )
    chosen = choose_features(store, store.site("x"), "patches")
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(
            "vitsee_core.runtime.machine.n_cores", lambda cores=cores: cores
        )
        use = Execution()
        labels = np.arange(30) * 4 // 30
        found.append(block_sums(chosen, use.rows(store), labels, use))
    one, several = found
    for a, b in zip(one, several, strict=True):
        assert np.array_equal(a.second, b.second) and np.array_equal(a.third, b.third)
    flat = x.reshape(-1, 9).astype(np.float64)
    assert total(one).raw == pytest.approx(flat.T @ flat, rel=1e-12)


def test_taking_a_block_out_again() -> None:
    x = features(60)
    parts = [CovarianceSums.from_examples(piece, x[0]) for piece in np.array_split(x, 4)]
    whole = total(parts)
    whole.add(parts[1], -1)
    left = np.concatenate(
        [piece for i, piece in enumerate(np.array_split(x, 4)) if i != 1]
    )
    assert np.allclose(
        whole.scatter, (left - left.mean(0)).T @ (left - left.mean(0)), rtol=1e-12
    )
    assert np.allclose(whole.mean, left.mean(0), rtol=1e-13)
    norms = ((left - left.mean(0)) ** 2).sum(1)
    assert whole.fourth_about_mean == pytest.approx(float(norms @ norms), rel=1e-11)


def test_the_participation_ratio_passes_the_number_of_examples() -> None:
    """D = 1,500 equal directions from 150 examples; the naive ratio would be 141."""
    x = np.random.default_rng(0).normal(size=(150, 1500))
    found = Spectrum.from_examples(x).metrics()["participation_ratio"]
    # the standard error of tr(C^2) is about 2 D / n of it
    assert found == pytest.approx(1500, rel=0.03)


@pytest.mark.slow
def test_one_large_mean_takes_rankme_to_one_and_leaves_the_effective_rank() -> None:
    x = np.random.default_rng(0).normal(size=(400, 50))
    x[:, 3] += 1000
    found = Spectrum.from_examples(x).metrics()
    assert found["rankme"] < 1.5
    assert found["effective_rank"] > 48


@pytest.mark.parametrize(("dim", "error"), [(1, 0.15), (3, 0.4)])
def test_the_intrinsic_dimension_of_a_cube(dim: int, error: float) -> None:
    """In 20 channels, whatever they are; four standard errors d / sqrt(n) of 1,500 examples."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(1500, dim)) @ np.linalg.qr(rng.normal(size=(20, dim)))[0].T
    found = TwoNearest(x, np.zeros(1500, np.int64)).dimension(np.ones(1, bool))
    assert found == pytest.approx(dim, abs=error)


def test_neighbours_without_a_block_and_equal_examples() -> None:
    x, labels = features(40), np.arange(40) * 5 // 40
    among = np.array([True, False, True, True, True])
    found = TwoNearest(x, labels).dimension(among)
    assert found == pytest.approx(loop_twonn(x[among[labels]]), rel=1e-9)
    doubled = TwoNearest(np.concatenate([x, x[:7]]), np.zeros(47, np.int64))
    assert doubled.n_equal == 7
    assert doubled.dimension(np.ones(1, bool)) == pytest.approx(loop_twonn(x), rel=1e-9)


def test_the_error_of_the_intrinsic_dimension_is_that_of_batch_means() -> None:
    x, labels = features(40), np.arange(40) * 5 // 40
    alone = [loop_twonn(x[labels == b]) for b in range(5)]
    error = np.std(alone, ddof=1) / math.sqrt(5) * loop_twonn(x) / np.mean(alone)
    assert standard_error(TwoNearest(x, labels).replicates()) == pytest.approx(
        error, rel=1e-9
    )


@pytest.mark.slow
def test_the_error_of_the_intrinsic_dimension_is_that_of_other_samples() -> None:
    """Over 100 samples: its standard deviation (error 1 / sqrt(200)) and the root mean square of
    the standard errors, each of 20 blocks (error 1 / sqrt(100 * 38)); four of both together, 0.3.
    Leaving blocks out gives 1.7 times the deviation."""
    rng, labels, every = np.random.default_rng(0), np.arange(300) // 15, np.ones(20, bool)
    found = [TwoNearest(rng.uniform(size=(300, 4)), labels) for _ in range(100)]
    errors = np.array([standard_error(one.replicates()) for one in found])
    true = np.std([one.dimension(every) for one in found], ddof=1)
    assert np.sqrt(np.mean(errors**2)) / true == pytest.approx(1, abs=0.3)


def test_collapse_against_loops() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 2, 5, 7], [9, 12, 5, 7])
    x = rng.normal(size=(33, 6)) + 3 * rng.normal(size=(8, 6))[labels]
    found, left_out = collapse(x, labels)
    assert left_out == 0
    for name, value in loop_collapse(x, labels).items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    # an example alone in its class changes nothing
    more, _ = collapse(np.concatenate([x, [x[0] * 9]]), np.append(labels, 9))
    assert more == found


def test_collapse_of_a_simplex_and_of_noise() -> None:
    corners = np.repeat(np.eye(4), 5, axis=0)
    found, _ = collapse(corners, np.repeat(np.arange(4), 5))
    assert found == pytest.approx(
        {"nc1": 0, "cdnv": 0, "nc2_norms": 0, "nc2_angles": 0}, abs=1e-12
    )
    # Noise of more channels than examples: in-sample means would agree with every label.
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(400, 600)), np.repeat(np.arange(20), 20)
    differs = nearest_mean_disagrees(x, labels, labels, halves(labels))
    assert differs.mean() == pytest.approx(0.95, abs=0.045)  # 4 standard errors
    assert collapse(x, labels)[1] > 0


@pytest.mark.parametrize(("n", "said"), [(0, ""), (1, "1 pair of"), (3, "3 pairs of")])
def test_pairs_of_classes_that_are_left_out_are_counted(n: int, said: str) -> None:
    x, labels = np.zeros((4, 2), np.float32), np.arange(4)
    remarks = ClassMeasures(x, labels, labels, None, ["cdnv"], left_out=n).remarks(
        "a pooled"
    )
    assert len(remarks) == bool(n)
    assert all(
        f"a pooled: cdnv is without {said} classes that" in line for line in remarks
    )


# ---------------------------------------------------------------- the analysis


def labelled(
    path: Path, n: int = 47, dim: int = 5, **more: Any
) -> tuple[Any, Array, Array]:
    """A store of a class token, two patches, logits of three classes, and labels."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 3, dim)) + 2 * rng.normal(size=(3, 1, dim))[labels]
    x = x.astype(np.float32).astype(np.float64)
    logits = rng.normal(size=(n, 3)) + 2 * np.eye(3)[labels]
    sites = {"embed": x, "logits": logits}
    return write_labelled(path, sites, labels, **more), x, logits


@pytest.mark.slow
def test_against_loops(tmp_path: Path) -> None:
    store, x, logits = labelled(tmp_path / "a.zarr")
    table = run(store)
    assert [*dict.fromkeys(table["metric"])] == list(METRICS)
    labels, cls = store.samples.label, x[:, 0]
    blocks = np.arange(47) * 20 // 47

    def expected(keep: Array) -> dict[str, float]:
        some, own = cls[keep], labels[keep]
        nc4 = nearest_mean_disagrees(
            some, own, logits[keep].argmax(1), halves(labels)[keep]
        )
        return {
            "rankme": entropy_of(np.linalg.svd(some, compute_uv=False)),
            "effective_rank": entropy_of(
                np.linalg.svd(some - some.mean(0), compute_uv=False)
            ),
            "participation_ratio": loop_participation(some),
            "alpha": math.nan,
            "anisotropy": loop_anisotropy(some),
            "twonn": loop_twonn(some),
            "nc4": float(nc4.mean()),
            **loop_collapse(some, own),
        }

    def column(name: str) -> dict[str, float]:
        return dict(zip(table["metric"].tolist(), table[name].tolist(), strict=True))

    close: Any = {"rel": 1e-9, "nan_ok": True}
    assert column("value") == pytest.approx(expected(np.ones(47, bool)), **close)
    assert column("half_a") == pytest.approx(expected(blocks % 2 == 0), **close)
    assert column("half_b") == pytest.approx(expected(blocks % 2 == 1), **close)
    assert table.replicates is not None
    seventh = dict(
        zip(table["metric"].tolist(), table.replicates[:, 7].tolist(), strict=True)
    )
    alone = math.nan  # no dimension of two images
    assert seventh == pytest.approx(expected(blocks != 7) | {"twonn": alone}, **close)
    of_this_size = table.notes["interval_of"]
    assert {"rankme", "effective_rank", "nc1", "twonn"} <= of_this_size.keys()
    assert not {"participation_ratio", "anisotropy", "cdnv", "nc4"} & of_this_size.keys()
    caps = column("cap")
    assert (caps["rankme"], caps["effective_rank"], caps["anisotropy"]) == (5, 5, 1)
    plot(table)


def test_tokens_are_examples(tmp_path: Path) -> None:
    store, x, _ = labelled(tmp_path / "a.zarr", slab=6)
    table = run(store, tokens="patches", jobs=2)
    assert not {*table["metric"]} & {"twonn", *OF_CLASSES}
    flat = x[:, 1:].reshape(-1, 5)
    value = dict(zip(table["metric"].tolist(), table["value"].tolist(), strict=True))
    assert value["rankme"] == pytest.approx(
        entropy_of(np.linalg.svd(flat, compute_uv=False))
    )
    assert value["participation_ratio"] == pytest.approx(
        loop_participation(flat), rel=1e-9
    )
    assert value["anisotropy"] == pytest.approx(loop_anisotropy(flat), rel=1e-9)
    assert set(table["n_examples"].tolist()) == {94}
    assert set(table["token"].tolist()) == {"patches"}
    again = run(labelled(tmp_path / "b.zarr", slab=47)[0], tokens="patches")
    assert again["value"] == pytest.approx(table["value"], rel=1e-10, nan_ok=True)


def test_fewer_images_than_channels(tmp_path: Path) -> None:
    x = features(9, 30)
    table = run(write_sites(tmp_path / "a.zarr", {"pooled": x}), sites=["head"])
    value = dict(zip(table["metric"].tolist(), table["value"].tolist(), strict=True))
    assert value["rankme"] == pytest.approx(
        entropy_of(np.linalg.svd(x, compute_uv=False))
    )
    assert table.filter(metric="effective_rank")["cap"].tolist() == [8]


def test_images_that_are_all_alike(tmp_path: Path, caplog: Any) -> None:
    same = np.tile(features(1, 5), (12, 1))
    with caplog.at_level("INFO"):
        table = run(write_sites(tmp_path / "a.zarr", {"pooled": same}), sites=["head"])
    assert "a pooled: all examples are alike, so they have no spectrum" in caplog.text
    value = dict(zip(table["metric"].tolist(), table["value"].tolist(), strict=True))
    assert (value["rankme"], value["anisotropy"]) == pytest.approx((1, 1))
    assert math.isnan(value["effective_rank"]) and math.isnan(value["twonn"])
    plot(table)


def test_refusals(tmp_path: Path) -> None:
    store, *_ = labelled(tmp_path / "a.zarr")
    other, *_ = labelled(tmp_path / "c.zarr", classes=list("abcd"))
    bare = write_sites(
        tmp_path / "b.zarr", {"pooled": features(8)}, labels=np.full(8, -1)
    )
    assert not {*[*dict.fromkeys(run(bare, sites="head")["metric"])]} & {*OF_CLASSES}
    assert "nc4" not in run(other)["metric"]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (store, {"metrics": ["rank"]}, "no metric 'rank'; metrics of spectrum: rankme, "),
        (
            store,
            {"metrics": ["twonn"], "tokens": "patches"},
            "twonn of embed of a needs .*: give",
        ),
        (store, {"memory": 1000}, r"\(5 channels\) takes .* of memory; --memory is"),
        (store, {"tokens": "9,9"}, "9,9"),
        (bare, {"metrics": ["nc1"], "sites": "head"}, "b has no labels of two classes"),
        (other, {"metrics": ["nc4"]}, "c keeps no logits of its labels' classes: no nc4"),
    ]
    for one, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(one, **choice)


@pytest.mark.slow
def test_alpha_depends_on_the_number_of_images() -> None:
    """As docs/guide/intervals.md says: eigenvalues that fall as 1 / rank."""
    spectrum = np.arange(1, 769.0) ** -1
    assert power_law(spectrum) == pytest.approx(1, abs=1e-9)
    rng = np.random.default_rng(0)
    found = {}
    for n in (300, 1000):
        values = []
        for _ in range(2):
            x = rng.normal(size=(n, len(spectrum))) * spectrum**0.5
            x -= x.mean(0)
            gram = x @ x.T if n < len(spectrum) else x.T @ x
            values.append(power_law(np.maximum(np.linalg.eigvalsh(gram / n)[::-1], 0.0)))
        found[n] = float(np.mean(values))
    assert found[300] == pytest.approx(0.90, abs=0.02)
    assert found[1000] == pytest.approx(0.95, abs=0.02)
    assert depends_on_size("alpha") and not depends_on_size("anisotropy")

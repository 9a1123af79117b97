"""vitsee concepts: planted patterns, reconstruction and purity by their definitions, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.stores import Site, write_model
from tests.tables import check_chosen_metrics, having
from vitsee_cli.main import main
from vitsee_core.analyses import concepts
from vitsee_core.analyses.concepts.figure import _cut
from vitsee_core.analyses.concepts.fitting import FittedDictionaries, matched_cosine
from vitsee_core.figures.patch_maps.photos import Photograph
from vitsee_core.runtime.execution import Execution
from vitsee_core.sae.dictionary import Dictionary
from vitsee_core.sae.dictionary_files import read_dictionary
from vitsee_core.tables.results import Table
from vitsee_stores import Store, TokenLayout
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

Array = NDArray[Any]
N, K, D, SITE = 60, 4, 12, "blocks.0.out"
LAYOUT = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
NEGATIVE = (
    np.random.default_rng(0).normal(size=(N, LAYOUT.n_tokens, D)).astype(np.float32)
)


def planted(method: str, seed: int = 0) -> tuple[Array, Array]:
    """(images, tokens, dim) patches of four patterns, and the pattern of each image's patches."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(N) % K
    shape = (N, LAYOUT.n_tokens)
    if method == "kmeans":
        x = 5 * rng.normal(size=(K, D))[kinds][:, None] + 0.05 * rng.normal(
            size=(*shape, D)
        )
    elif method == "nmf":
        directions = np.zeros((K, D))
        for j in range(K):
            directions[j, 3 * j : 3 * j + 3] = rng.uniform(1, 2, 3)
        codes = rng.uniform(0, 0.2, (*shape, K))
        codes[np.arange(N), :, kinds] += 3
        x = codes @ directions
    else:
        axes, _ = np.linalg.qr(rng.normal(size=(D, D)))
        scale = np.array([16.0, 8, 4, 2, *[0.05] * (D - K)])
        x = rng.normal(size=(*shape, D)) * scale @ axes.T + 3
    return x.astype(np.float32), kinds


def store_of(
    path: Path, x: Array, labels: Sequence[int] | Array | None = None, **more: Any
) -> Store:
    sites: dict[str, Site] = {SITE: (x, LAYOUT), "pooled": x[:, 0]}
    return write_model(path / "a.zarr", sites, labels=labels, slab=16, **more)


def value(table: Table, metric: str, baseline: str = "") -> float:
    (found,) = having(table, metric=metric, baseline=baseline)["value"]
    return float(found)


@pytest.mark.parametrize("method", ["kmeans", "nmf", "pca"])
def test_planted_concepts_are_found_in_both_halves(tmp_path: Path, method: str) -> None:
    x, kinds = planted(method)
    table = concepts.run(store_of(tmp_path, x, kinds), method=method, k=K, sites=[SITE])
    assert value(table, "stability") > 0.99
    assert value(table, "r2") > 0.98
    assert value(table, "stability", "shuffled") < 0.8
    if method != "pca":
        assert value(table, "purity") == 1
        assert value(table, "purity", "shuffled") < 0.6
        assert table.filter(metric="share")["value"].astype(float) == pytest.approx(
            [0.25] * K
        )


def test_metrics_are_chosen(tmp_path: Path) -> None:
    """Beside them are the concepts' shares and patches, which the figure is made of."""
    work = partial(
        concepts.run, store_of(tmp_path, *planted("pca")), method="pca", k=K, sites=[SITE]
    )
    rows = {name: [name, "share", "activation"] for name in concepts.METRICS}
    check_chosen_metrics(work, concepts.plot, rows, "concepts")
    assert [text for _, text in concepts.headline(work(metrics=["purity"]))] == []


@pytest.mark.parametrize("method", ["kmeans", "pca"])
def test_noise_gives_no_stable_concepts(tmp_path: Path, method: str) -> None:
    x = np.random.default_rng(0).normal(size=(N, LAYOUT.n_tokens, 64)).astype(np.float32)
    table = concepts.run(store_of(tmp_path, x), method=method, k=K, sites=[SITE])
    assert value(table, "stability") < 0.5
    assert "purity" not in table["metric"]


@pytest.mark.parametrize(
    ("method", "more"), [("kmeans", {}), ("nmf", {"clamp": True}), ("pca", {})]
)
def test_numbers_are_those_of_the_definitions(
    tmp_path: Path, method: str, more: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, LAYOUT.n_tokens, D)).astype(np.float32)
    labels, valid = rng.integers(0, 3, N), np.ones(N, bool)
    valid[[2, 33]] = False
    labels[5] = -1
    file = tmp_path / "d.safetensors"
    store = store_of(tmp_path, x, labels, valid=valid)
    table = concepts.run(
        store, method=method, k=K, sites=[SITE], save=file, top=3, **more
    )
    d = read_dictionary(file)
    patches = d.target(x[valid][:, 1:].reshape(-1, D))
    codes = d.encode(patches)
    error = ((patches.astype(float) - d.decode(codes)) ** 2).sum()
    spread = ((patches.astype(float) - patches.mean(0, dtype=float)) ** 2).sum()
    assert value(table, "r2") == pytest.approx(1 - error / spread, abs=1e-3)
    row = table.frame.filter(metric="r2").row(0, named=True)
    assert row["low"] < row["value"] < row["high"]
    assert (row["n_images"], row["n_examples"]) == (58, 58 * 6)
    table_of = np.zeros((K, 3))
    share = np.zeros(K)
    of_image = np.repeat(labels[valid], 6)
    for code, label in zip(codes, of_image, strict=True):
        best = int(np.argmax(np.abs(code)))
        if code[best] != 0:
            share[best] += 1
            if label >= 0:
                table_of[best, label] += 1
    assert value(table, "purity") == pytest.approx(
        table_of.max(1).sum() / table_of.sum(), abs=0.01
    )
    found = table.filter(metric="share")["value"].astype(float)
    assert found == pytest.approx(share / share.sum(), abs=0.01)
    activation = d.activation(patches, codes).reshape(58, 6, K)
    top = table.filter(metric="activation", concept=1)
    wanted = np.sort(activation.max(1)[:, 1])[::-1][:3]
    assert top["value"].astype(float) == pytest.approx(wanted, abs=1e-3)
    assert len(set(top["image"].tolist())) == 3
    ids = store.samples.id[valid].tolist()
    for image, r, c, v in zip(
        *(top[name].tolist() for name in ("image", "row", "col", "value")), strict=True
    ):
        assert activation[ids.index(image), 3 * int(r) + int(c), 1] == pytest.approx(
            v, abs=1e-3
        )


def cosine(a: Any, b: Any, kind: str = "nnls", mean: float = 0) -> float:
    """The matched cosine of two halves with these concepts."""
    halves = []
    for rows in (np.asarray(a, np.float32), np.asarray(b, np.float32)):
        zeros = np.zeros(rows.shape[1], np.float32)
        halves.append(
            Dictionary(kind, rows, zeros, rows.T, np.zeros(len(rows), np.float32))
        )
    return matched_cosine(
        FittedDictionaries(halves[0], (halves[0], halves[1]), zeros + np.float32(mean))
    )


@pytest.mark.parametrize("kind", ["nnls", "linear"])
@pytest.mark.parametrize("seed", range(5))
def test_the_match_is_the_best_of_all_permutations(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 4, 6)).astype(np.float32)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    cosines = unit[0] @ unit[1].T
    if kind == "linear":
        cosines = np.abs(cosines)
    best = max(
        np.mean([cosines[i, j] for i, j in enumerate(order)])
        for order in itertools.permutations(range(4))
    )
    assert cosine(a, b, kind) == pytest.approx(best, abs=1e-6)


def test_by_hand() -> None:
    rows = [[1, 0], [0, 1]]
    assert cosine(rows, rows[::-1]) == pytest.approx(1)
    assert cosine(rows, [[1, 1], [0, 2]]) == pytest.approx((np.sqrt(0.5) + 1) / 2)
    assert cosine(rows, [[-1, 0], [0, -1]], "linear") == pytest.approx(1)
    # About the mean (1, 1) the centres (1, 0), (0, 1) and (2, 1), (1, 2) point the other way.
    assert cosine(rows, [[2, 1], [1, 2]], "nearest", mean=1) == pytest.approx(0)


def test_equal_seeds_give_equal_tables(tmp_path: Path) -> None:
    store = store_of(tmp_path, np.abs(NEGATIVE))
    for method in ("kmeans", "nmf", "pca"):
        first, again = (
            concepts.run(
                store, method=method, k=K, sites=[SITE], execution=Execution(jobs=jobs)
            )
            for jobs in (1, 3)
        )
        assert first["value"].tolist() == again["value"].tolist()
    other = concepts.run(
        store, method="pca", k=K, sites=[SITE], execution=Execution(seed=1)
    )
    assert other["value"].tolist() != first["value"].tolist()


def test_crops_are_white_beyond_the_image() -> None:
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    whole = Photograph(pixels, (0.0, 0.0, 1.0, 1.0))
    crop = _cut(whole, (-0.25, 0.25, 0.5, 1.0))
    assert crop.shape == (48, 48, 3)
    small = crop[::16, ::16, 0]
    np.testing.assert_array_equal(small, [[255] * 3, [1, 2, 3], [5, 6, 7]])
    half = Photograph(pixels, (0.0, 0.5, 1.0, 1.0))  # the right half of an image
    np.testing.assert_array_equal(_cut(half, (0, 0.5, 1, 1))[::12, ::12, 0], pixels)
    assert (_cut(half, (0, 0, 1, 0.5)) == 255).all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": "ica"}, "no method 'ica'; expected kmeans, nmf, pca"),
        ({"k": 0}, "k is 0, epochs 2, top 6; expected 1 or more of each"),
        ({"epochs": 0}, "epochs 0"),
        (
            {"execution": Execution(seed=2**32)},
            "the seed is 4294967296; scikit-learn takes 0 to",
        ),
        ({"method": "nmf"}, rf"{SITE} of a has negative numbers \(-.*give --clamp"),
        (
            {"k": 200},
            "200 concepts were asked for, but half of the images of .* has 180 patches",
        ),
        (
            {"method": "pca", "k": 13},
            "12 channels and so no more axes; --k 13 were asked for",
        ),
        ({"sites": ["pooled"]}, "pooled of a has no grid of patches"),
        ({"sites": ["blocks.9.out"]}, "blocks.9.out"),
        ({"save": "d.npz"}, "expected a name that ends in .safetensors"),
        ({"save": "missing/d.safetensors"}, "there is no folder"),
        ({"execution": Execution(images=1)}, "one image that counts; expected 2 or more"),
    ],
)
def test_refusals(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    store = store_of(tmp_path, NEGATIVE)
    if "save" in more:
        more = more | {"save": tmp_path / more["save"]}
    with pytest.raises(VitseeError, match=message) as error:
        concepts.run(store, **{"sites": [SITE], "k": K, **more})
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


def test_more_refusals(tmp_path: Path) -> None:
    two: dict[str, Site] = {"blocks.0.out": NEGATIVE, "blocks.1.out": NEGATIVE}
    store = write_model(tmp_path / "two.zarr", two, layout=LAYOUT)
    with pytest.raises(
        VitseeError, match="--save takes the dictionary of one site; 2 are chosen"
    ):
        concepts.run(store, sites=["blocks"], save=tmp_path / "d.safetensors")
    pooled = write_model(tmp_path / "pooled.zarr", two, layout=LAYOUT, tokens="pooled")
    with pytest.raises((MissingInput, SiteError)):
        concepts.run(pooled)
    infinite = NEGATIVE.copy()
    infinite[3, 4] = np.inf
    damaged = write_model(
        tmp_path / "inf.zarr", {"blocks.0.out": infinite}, layout=LAYOUT
    )
    with pytest.raises(VitseeError, match="not finite"):
        concepts.run(damaged, k=K)


def test_patches_all_alike_have_no_r2(tmp_path: Path) -> None:
    x = np.ones((N, LAYOUT.n_tokens, D), np.float32)
    table = concepts.run(store_of(tmp_path, x), k=1, sites=[SITE])
    assert np.isnan(value(table, "r2"))


def test_what_is_saved_is_what_encode_reads(tmp_path: Path) -> None:
    store = store_of(tmp_path, NEGATIVE)
    file, codes = tmp_path / "d.safetensors", tmp_path / "codes.zarr"
    run = CliRunner()
    words = [
        "concepts",
        str(store.path),
        "--method",
        "pca",
        "--k",
        str(D),
        "--sites",
        SITE,
    ]
    words += ["--save", str(file), "-o", str(tmp_path / "c.csv")]
    file.write_bytes(b"mine")
    refused = run.invoke(main, words)
    assert refused.exit_code == 1 and "d.safetensors exists" in refused.stderr
    assert file.read_bytes() == b"mine" and not (tmp_path / "c.csv").exists()
    result = run.invoke(main, [*words, "--force"])
    assert result.exit_code == 0, result.output
    words = ["encode", str(store.path), "--dictionary", str(file), "-o", str(codes)]
    result = run.invoke(main, words)
    assert result.exit_code == 0, result.output
    assert f"{SITE}: r2 1, l0 {D}, never_active 0" in result.stdout

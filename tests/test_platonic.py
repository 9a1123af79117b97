"""--preset platonic: outliers, neighbours, the largest over layers, as Huh et al. 2024 have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.stores import VIT, write_model
from vitsee_cli.main import main
from vitsee_core.analyses.similarity import run, without_outliers
from vitsee_core.features.matrix import clamped, quantile_of_sizes
from vitsee_core.runtime.execution import Execution
from vitsee_core.similarity import Representation
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

Array = NDArray[Any]
N, DIM, LAYERS = 48, 6, 3


def heavy(seed: int, offset: float = 0.0) -> dict[str, Array]:
    """Blocks of a ViT whose few largest activations decide the cosine."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(99).normal(size=(N, DIM))
    found = {"embed": rng.normal(size=(N, VIT.n_tokens, DIM))}
    for i in range(LAYERS):
        x = rng.standard_t(1.5, size=(N, VIT.n_tokens, DIM)) * 4**i + offset
        x[:, 0] += 4**i * shared
        found[f"blocks.{i}.out"] = x
    return {name: x.astype(np.float32) for name, x in found.items()}


def class_tokens(sites: dict[str, Array]) -> Array:
    """(images, layers, dim)"""
    return np.stack([x[:, 0] for name, x in sites.items() if name != "embed"], 1)


def cut(features: Array) -> Array:
    """At the 0.95 quantile of all |x| of the model: the sorted values' int(0.95 m)-th."""
    sizes = sorted(abs(float(v)) for v in features.ravel())
    bound = sizes[int(0.95 * len(sizes))]
    return np.clip(features.astype(np.float64), -bound, bound)


def score(x: Array, y: Array, k: int = 10) -> float:
    """Mutual k-NN of two layers, image by image: unit length, inner products, oneself last."""
    lists = []
    for z in (x, y):
        unit = z / np.linalg.norm(z, axis=-1, keepdims=True)
        similar = unit @ unit.T
        np.fill_diagonal(similar, -1e8)
        lists.append(np.argsort(-similar, axis=1)[:, :k])
    return float(np.mean([len({*a} & {*b}) / k for a, b in zip(*lists, strict=True)]))


def two(tmp_path: Path) -> tuple[dict[str, Array], dict[str, Array], list[Store]]:
    a, b = heavy(1), heavy(2, 0.3)
    stores = [
        write_model(tmp_path / f"{name}.zarr", s) for name, s in (("a", a), ("b", b))
    ]
    return a, b, stores


@pytest.mark.slow
def test_every_pair_of_layers_and_the_largest(tmp_path: Path) -> None:
    a, b, stores = two(tmp_path)
    table = run(*stores, preset="platonic", no_cache=True)
    x, y = cut(class_tokens(a)), cut(class_tokens(b))
    expected = [[score(x[:, i], y[:, j]) for j in range(LAYERS)] for i in range(LAYERS)]
    assert table["value"].reshape(LAYERS, LAYERS) == pytest.approx(
        np.array(expected), abs=1e-12
    )
    assert [*dict.fromkeys(table["site_a"])] == [f"blocks.{i}.out" for i in range(LAYERS)]
    assert set(table["k"].tolist()) == {10}
    i, j = np.unravel_index(np.argmax(expected), (LAYERS, LAYERS))
    assert table.notes["alignment"] == [
        f"mutual_knn of a and b, the largest over layers: {expected[i][j]:.4g} "
        f"(blocks.{i}.out, blocks.{j}.out)"
    ]
    # A cut layer by layer gives other numbers.
    single = [
        score(cut(class_tokens(a)[:, i]), cut(class_tokens(b)[:, i]))
        for i in range(LAYERS)
    ]
    assert max(abs(single[i] - expected[i][i]) for i in range(LAYERS)) > 0.01


@pytest.mark.slow
def test_only_images_that_are_compared_decide_the_bound(tmp_path: Path) -> None:
    a, b, _ = two(tmp_path)
    valid = np.ones(N, int)
    valid[[3, 20]] = 0
    a["blocks.1.out"][3] = 1e6
    stores = [
        write_model(tmp_path / f"{name}.zarr", s, **more)
        for name, s, more in (("c", a, {"valid": valid}), ("d", b, {}))
    ]
    kept = np.flatnonzero(valid)
    table = run(*stores, preset="platonic", no_cache=True)
    x, y = cut(class_tokens(a)[kept]), cut(class_tokens(b)[kept])
    expected = [[score(x[:, i], y[:, j]) for j in range(LAYERS)] for i in range(LAYERS)]
    assert table["value"] == pytest.approx(np.ravel(expected), abs=1e-12)
    first = run(*stores, preset="platonic", images=30, no_cache=True)
    kept = kept[kept < 30]
    x, y = cut(class_tokens(a)[kept]), cut(class_tokens(b)[kept])
    assert first["value"][0] == pytest.approx(score(x[:, 0], y[:, 0]), abs=1e-12)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(share=st.floats(0, 0.999), seed=st.integers(0, 5), half=st.booleans())
def test_the_quantile_is_that_of_sorting(
    share: float, seed: int, half: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    sites = {f"blocks.{i}.out": rng.standard_cauchy((11, 7, 3)) for i in range(2)}
    sites["blocks.0.out"][2] = 0
    dtype = "float16" if half else "float32"
    sites = {name: x.clip(-6e4, 6e4).astype(dtype) for name, x in sites.items()}
    path = tmp_path_factory.mktemp("s") / "a.zarr"
    store = write_model(path, sites, dtype=dtype, slab=4)
    mask = rng.random(11) < 0.7
    mask[0] = True
    found = quantile_of_sizes(
        [Representation(store, site).features for site in store.select(["blocks"])],
        mask,
        share,
    )
    sizes = np.sort(
        np.concatenate([abs(x[mask].astype(np.float32)).ravel() for x in sites.values()])
    )
    assert found == sizes[int(share * len(sizes))]


@pytest.mark.slow
def test_clamped_features_are_others_for_the_cache(tmp_path: Path) -> None:
    _, _, (store, _) = two(tmp_path)
    plain = Representation(store, store.sites["blocks.0.out"], "cls")
    (cut_off,) = without_outliers([plain], Execution(), "image")
    assert cut_off.clamp is not None
    assert cut_off.features.identity[:-1] == plain.features.identity
    assert cut_off.features.identity[-1] == f"clamped at {cut_off.clamp!r}"
    values = plain.features.strips(100)[0].read(slice(0, N))
    expected = np.clip(values, -np.float32(cut_off.clamp), np.float32(cut_off.clamp))
    again = clamped(plain.features, cut_off.clamp)
    assert np.array_equal(again.strips(100)[0].read(slice(0, N)), expected)
    # With a cache on, plain and cut matrices stand beside each other.
    both = [
        run(store, preset=preset, tokens="cls") for preset in (None, "platonic", None)
    ]
    assert np.array_equal(both[0]["value"], both[2]["value"])


def test_choices_beside_it_win(tmp_path: Path) -> None:
    *_, stores = two(tmp_path)
    table = run(
        *stores, preset="platonic", k=3, metrics=["cknna"], tokens="mean", sites=["last"],
        no_cache=True,
    )  # fmt: skip
    assert table["metric"].tolist() == ["cknna"]
    assert (table["k"].tolist(), table.notes["tokens"]) == ([3], "mean")
    assert "Huh et al. 2024" in table.notes["preset"]
    with pytest.raises(VitseeError, match="no preset 'plato'; expected platonic"):
        run(*stores, preset="plato")


def test_the_help_says_its_tokens() -> None:
    helps = CliRunner().invoke(main, ["similarity", "--help"]).output
    assert "all; cls with --preset platonic" in " ".join(helps.split())


def test_a_model_without_a_class_token(tmp_path: Path) -> None:
    from tests.stores import CNN

    x = np.random.default_rng(0).normal(size=(20, 4, 3))
    store = write_model(
        tmp_path / "r.zarr", {"layer1.0.out": x, "layer1.1.out": x + 1}, layout=CNN
    )
    with pytest.raises(
        SiteError, match=r"no class token.*\(--preset platonic .* --tokens mean"
    ):
        run(store, preset="platonic")
    assert len(run(store, preset="platonic", tokens="mean", no_cache=True)) == 4
    with pytest.raises(SiteError) as plain:
        run(store, tokens="cls")
    assert "preset" not in str(plain.value)


def test_too_many_neighbours_are_refused_before_any_work(tmp_path: Path) -> None:
    *_, stores = two(tmp_path)
    for images, most in ((None, N - 1), (20, 19)):
        with pytest.raises(VitseeError, match=f"expected at most {most}"):
            run(*stores, k=60, images=images)
    assert not (tmp_path / "a.zarr.grams").exists()

"""Dense probes of several sites, of grids with other strides, and of images beside padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.stores import write_sites
from tests.tables import having
from tests.test_dense_probe import STEP, class_map, layout, made, transform
from vitsee_core.analyses.dense_probe import run
from vitsee_core.images.placement import place
from vitsee_stores import Store
from vitsee_stores.errors import SiteError

SITES = ("blocks.0.out", "blocks.1.out", "blocks.2.out")
SOLVERS: dict[str, dict[str, Any]] = {
    "ridge": {"l2_relative": [0.1]},
    "logistic": {"l2_relative": [0.1]},
    "knn": {"ks": [3]},
    "hummingbird": {"ks": [3]},
    "sgd": {"steps": 5},
}


def patches(store: Store, site: str) -> Any:
    values = np.asarray(store.acts(site, "patches")[:], np.float32)
    return values.reshape(len(values), -1, values.shape[-1])


@pytest.mark.parametrize("solver", SOLVERS)
def test_sites_side_by_side_are_one_of_their_channels(
    tmp_path: Path, solver: str
) -> None:
    store, masks = made(tmp_path, 10, sites=SITES)
    joined = np.concatenate([patches(store, site) for site in SITES[1:]], -1)
    other = write_sites(
        tmp_path / "b.zarr", {"blocks.2.out": (joined, layout(3, 4))}, slab=5, sizes=store.sizes,
        ids=store.samples.id.tolist(), transform=transform(12, 16),
    )  # fmt: skip
    choice: dict[str, Any] = {
        "masks": masks,
        "holdout": 0.4,
        "solver": solver,
        **SOLVERS[solver],
    }
    table, plain = run(store, concat=2, **choice), run(other, **choice)
    assert set(table["site"].tolist()) == {"blocks.1.out+blocks.2.out"}
    assert table["value"].tolist() == plain["value"].tolist()
    last = run(store, sites=["blocks.2.out"], **choice)
    assert set(table["depth"].tolist()) == set(last["depth"].tolist())


def test_wrong_sites_side_by_side_are_refused(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 6)
    choice: dict[str, Any] = {"masks": masks, "holdout": 0.4}
    with pytest.raises(
        SiteError, match=r"--concat last4: a has 2 of the chosen sites with a grid"
    ):
        run(store, concat=4, **choice)
    mixed, _ = strided(tmp_path / "more")
    with pytest.raises(
        SiteError, match=r"the grids of stages.0.out and stages.1.out differ"
    ):
        run(mixed, concat=2, sites=["stages.*"], **choice)


def strided(
    folder: Path, garbage: float | None = None, mode: str = "squash"
) -> tuple[Store, Path]:
    """Sites of strides 4 and 8 over inputs of 16 x 24 px; garbage: in cells beside the images."""
    rng = np.random.default_rng(0)
    n, sizes = 12, [(16, 24), (4, 20), (24, 8)] * 4
    masks = folder / "masks"
    masks.mkdir(parents=True)
    for i, size in enumerate(sizes):
        Image.fromarray(class_map(size, i, (0, 1, 3))).save(masks / f"a{i}.png")
    seen: dict[str, Any] = transform(16, 24, mode)
    if mode == "corner":
        seen |= {"short_side": 8, "multiple": STEP}
    tokens: dict[str, Any] = {}
    for site, step in (("stages.0.out", 4), ("stages.1.out", 8)):
        where = layout(16 // step, 24 // step, step)
        values = rng.normal(size=(n, where.n_body, 5)).astype(np.float32)
        for i, size in enumerate(sizes):
            beside = ~place(seen, size).on_image(where).ravel()
            if garbage is not None:
                values[i, beside] = garbage
        tokens[site] = values, where
    store = write_sites(
        folder / "a.zarr", tokens, slab=5, sizes=sizes, ids=[f"a{i}.jpg" for i in range(n)],
        transform=seen,
    )  # fmt: skip
    return store, masks


@pytest.mark.parametrize("solver", SOLVERS)
def test_each_stride_is_probed_as_if_alone(tmp_path: Path, solver: str) -> None:
    store, masks = strided(tmp_path)
    choice: dict[str, Any] = {
        "masks": masks,
        "holdout": 0.4,
        "solver": solver,
        **SOLVERS[solver],
    }
    table = run(store, sites=["stages.*"], **choice)
    for site in ("stages.0.out", "stages.1.out"):
        alone = run(store, sites=[site], **choice)
        assert having(table, site=site)["value"].tolist() == alone["value"].tolist()


@pytest.mark.parametrize("mode", ["border", "corner"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_cells_beside_an_image_have_no_part(
    tmp_path: Path, solver: str, mode: str
) -> None:
    choice: dict[str, Any] = {"holdout": 0.4, "sites": ["stages.*"], "solver": solver}
    found = []
    for name, garbage in (("zero", 0.0), ("large", 1000.0)):
        store, masks = strided(tmp_path / name, garbage, mode)
        table = run(store, masks=masks, **choice, **SOLVERS[solver])
        found.append(table["value"].tolist())
    assert found[0] == found[1]
    assert (patches(store, "stages.0.out") == 1000).any()

"""The mean norm against a loop over images and tokens, of a store that this test makes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import vitsee


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> vitsee.Store:
    place = tmp_path_factory.mktemp("stores") / "vit.zarr"
    return vitsee.extract("demo:vit", "demo:test", place, images=6, slab=4)


@pytest.mark.parametrize(("order", "power"), [("2", 2), ("1", 1)])
def test_it_is_the_mean_of_a_loop(store: vitsee.Store, order: str, power: int) -> None:
    table = vitsee.token_norm(store, sites="blocks.1.out", order=order)
    images = store.acts("blocks.1.out")[:].astype(float)
    norms = [
        math.fsum(
            math.fsum(abs(x) ** power for x in token.tolist()) ** (1 / power)
            for token in image
        )
        / len(image)
        for image in images
    ]
    assert table["value"].tolist() == pytest.approx(
        [math.fsum(norms) / len(norms)], rel=1e-6
    )
    assert table["n_images"].tolist() == [6]


def test_its_figure_and_its_words(store: vitsee.Store, tmp_path: Path) -> None:
    table = vitsee.token_norm(store)
    assert table["site"].tolist()[0] == "embed"
    table.plot().savefig(tmp_path / "norm.png")
    table.to_csv(tmp_path / "norm.csv")
    assert (
        vitsee.Table.read(tmp_path / "norm.csv")["value"].tolist()
        == table["value"].tolist()
    )

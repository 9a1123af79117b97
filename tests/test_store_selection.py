"""Sites of several stores: selectors that not every store answers to, and inputs that not every
store has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.extractions import RESNET, VIT, extracted, plant_images
from tests.residuals import cnn, vit
from tests.stores import attention_group, write_attention, write_labelled, write_residuals
from tests.tables import unique
from vitsee_cli.main import main
from vitsee_core.analyses import attn_dist, cluster, normratio
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_stores import SiteSpec, Store, open_store
from vitsee_stores.errors import MissingInput, SiteError

LABELS = np.arange(12) % 2


def labelled(path: Path, *sites: str) -> Store:
    rng = np.random.default_rng(len(sites))
    values = {site: rng.normal(size=(12, 3, 4)) for site in sites}
    return write_labelled(path, values, LABELS)


def distances(n: int) -> dict[str, NDArray[np.float32]]:
    """Of two blocks of two heads."""
    names = ("distance_px", "distance_px_raw", "distance_unit")
    rng = np.random.default_rng(0)
    return {
        f"attention/{name}": rng.uniform(0, 40, (n, 2, 2)).astype("f4") for name in names
    }


@pytest.fixture
def two(tmp_path: Path) -> list[Store]:
    """Names of two families."""
    return [
        labelled(tmp_path / "a.zarr", "embed", "blocks.0.out", "blocks.1.out"),
        labelled(tmp_path / "b.zarr", "stem", "layer1.0.out", "layer1.1.out"),
    ]


def chosen(stores: list[Store], *patterns: str) -> list[list[str]]:
    found = select_each(stores, patterns, sites_of)
    assert found.stores == stores and found.notes() == {}
    return [[site.name for site in sites] for sites in found.chosen]


def test_a_union_of_names(two: list[Store], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(two, "blocks.1.out,layer1.*.out") == [
        ["blocks.1.out"], ["layer1.0.out", "layer1.1.out"],
    ]  # fmt: skip
    assert [r.getMessage() for r in caplog.records] == [
        "a: no site matches layer1.*.out",
        "b: no site matches blocks.1.out",
    ]


def test_what_is_left_out_may_be_missing_too(two: list[Store]) -> None:
    assert chosen(two, "all", "!embed") == [
        ["blocks.0.out", "blocks.1.out"], ["stem", "layer1.0.out", "layer1.1.out"],
    ]  # fmt: skip
    assert chosen(two, "all,!embed,!stem")[1] == ["layer1.0.out", "layer1.1.out"]


@pytest.mark.parametrize(
    ("patterns", "store", "said"),
    [
        (["blocks.0.out"], "b", "'blocks.0.out'"),  # nothing of b
        (["all", "nomr"], "a", "'nomr'"),  # a typo in both
        (["all", "!nomr"], "a", "'nomr'"),
        (["blocks.0.out", "!stem"], "b", "'blocks.0.out'"),  # only left out
    ],
)
def test_what_has_to_match(
    two: list[Store], patterns: list[str], store: str, said: str
) -> None:
    with pytest.raises(
        SiteError, match=rf"no site matches {said}; sites of this store, {store}:"
    ):
        chosen(two, *patterns)


def test_cluster_takes_a_union(two: list[Store]) -> None:
    table = cluster.run(
        *two, sites=["blocks.1.out", "layer1.1.out"], baselines=[], n_seeds=1
    )
    places = zip(table["store"].tolist(), table["site"].tolist(), strict=True)
    assert {*places} == {("a", "blocks.1.out"), ("b", "layer1.1.out")}
    alone = cluster.run(two[1], sites=["layer1.1.out"], baselines=[], n_seeds=1)
    assert table.filter(store="b")["value"].tolist() == alone["value"].tolist()


def test_a_store_without_attention_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [attention_group(["blocks.0", "blocks.1"], [2, 2])]
    store = write_attention(tmp_path / "a.zarr", groups, distances(5), n_images=5)
    reason = {"attention": "resnet18 has no token-to-token attention"}
    other = write_attention(tmp_path / "r18.zarr", [], {}, n_images=5, left_out=reason)
    table = attn_dist.run(store, other)
    alone = attn_dist.run(store)
    assert unique(table, "store") == ["a"]
    assert table["value"].tolist() == alone["value"].tolist()
    said = "r18 has no attention summaries: resnet18 has no token-to-token "
    assert table.notes["left_out"] == {"r18": f"{said}attention"}
    assert "left_out" not in alone.notes
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"left out: {said}attention"
    ]
    with pytest.raises(MissingInput, match=r"^r18 has no attention"):
        attn_dist.run(other)


def test_a_store_without_residuals_is_left_out(tmp_path: Path) -> None:
    a, b = vit(tmp_path / "a.zarr"), cnn(tmp_path / "c.zarr")
    plain = write_residuals(tmp_path / "b.zarr", {}, n_images=3)
    table = normratio.run(a, plain, b, tokens=["patches"])
    assert unique(table, "store") == ["a", "c"]
    assert [*table.notes["left_out"]] == ["b"]
    assert table.notes["images"].keys() == {"a", "c"}


def test_sublayers_by_place(tmp_path: Path) -> None:
    a = vit(tmp_path / "a.zarr")
    assert unique(normratio.run(a, sites=["last"]), "site") == [
        "blocks.1.attn",
        "blocks.1.mlp",
    ]
    assert unique(normratio.run(a, sites=["last,!mlp"]), "site") == ["blocks.1.attn"]
    assert unique(normratio.run(a, sites=["attn"]), "site") == [
        "blocks.0.attn",
        "blocks.1.attn",
    ]


@pytest.mark.slow
def test_places_on_two_families_from_extract_to_cka(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 8)
    for name, model in (("vit", VIT), ("cnn", RESNET)):
        places = ["--sites", "first,last", "--sites", "depth:0.5"]
        extracted(*model, *places, "--data", data, "-o", tmp_path / f"{name}.zarr")
    stores = [open_store(tmp_path / f"{name}.zarr") for name in ("vit", "cnn")]
    assert [
        [s.name for s in store.sites.values() if s.part == "out"] for store in stores
    ] == [
        ["blocks.0.out", "blocks.2.out", "blocks.5.out"],
        ["layer1.0.out", "layer2.0.out", "layer4.0.out"],
    ]
    args = [*map(str, (s.path for s in stores)), "--sites", "last", "--no-cache"]
    result = CliRunner().invoke(main, ["cka", *args])
    assert result.exit_code == 0, result.output
    (row,) = result.stdout.splitlines()[1:]
    assert row.startswith(
        "vit,test_vit,random 0,blocks.5.out,blocks.5,6,1.0,cnn,test_resnet,"
    )
    assert ",random 0,layer4.0.out," in row


def test_one_selector_is_asked_once(two: list[Store]) -> None:
    """What choosing logs, it logs once."""
    asked: list[str] = []

    def select(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
        asked.append(store.label)
        return sites_of(store, patterns)

    found = select_each(two, ["last"], select)
    assert asked == ["a", "b"]
    assert [[s.name for s in sites] for sites in found.chosen] == chosen(
        two, "last", "last"
    )
    assert [[s.name for s in sites] for sites in found.chosen] == [
        ["blocks.1.out"],
        ["layer1.1.out"],
    ]

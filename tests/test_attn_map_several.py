"""attn-map of several stores: as one by one, those without attention left out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extractions import RESNET, VIT, extracted, plant_images
from tests.tables import having, unique
from vitsee_core.analyses.attn_map import plot, run
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput

OTHER = [
    "test_vit",
    "--random-init",
    "1",
    "--img-size",
    "24",
    "--model-arg",
    "patch_size=8",
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    """Two of other grids, and one without attention."""
    folder = tmp_path_factory.mktemp("several")
    data = plant_images(folder / "data", 4)
    for name, model in (("a", VIT), ("cnn", RESNET), ("b", OTHER)):
        full = [] if name == "cnn" else ["--attention", "full"]
        extracted(*model, *full, "--data", data, "-o", folder / f"{name}.zarr")
    return [open_store(folder / f"{name}.zarr") for name in ("a", "cnn", "b")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "aligned", "sites": ["last"]},
        {"kind": "mean-cls"},
        {"kind": "rollout"},
        {"kind": "entropy"},
        {"image": ["0", "2"], "query": [(0, 1)]},
    ],
    ids=lambda options: options.get("kind", "image"),
)
def test_as_one_by_one(stores: list[Store], options: dict[str, Any]) -> None:
    a, _, b = stores
    table = run(*stores, **options)
    assert unique(table, "store") == ["a", "b"]
    assert [*table.notes["left_out"]] == ["cnn"]
    for store in (a, b):
        alone, rows = run(store, **options), having(table, store=store.label)
        assert "left_out" not in alone.notes and "stores" not in alone.notes
        for name in alone.written.columns:
            assert rows[name].tolist() == alone[name].tolist()
        plot(alone)
    drawn = plot(table)
    texts = [text.get_text() for axes in drawn.axes for text in axes.get_yticklabels()]
    titles = [axes.get_title() or axes.get_title(loc="left") for axes in drawn.axes]
    everything = " ".join([*texts, *titles, *(text.get_text() for text in drawn.texts)])
    assert all(name in everything.replace(":", " ").split() for name in "ab")


def test_pictures_of_each_store_are_its_own(stores: list[Store]) -> None:
    """Their inputs have other sizes, so the pictures differ."""
    table = run(stores[0], stores[2], image=["0"])
    assert "pictures" not in table.notes
    own = [table.notes["stores"][label]["pictures"] for label in "ab"]
    assert own[0] == run(stores[0], image=["0"]).notes["pictures"] != own[1]


def test_without_any_attention(stores: list[Store]) -> None:
    with pytest.raises(MissingInput, match=r"^cnn has no attention summaries"):
        run(stores[1], kind="entropy")

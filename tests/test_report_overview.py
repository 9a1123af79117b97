"""The head of a report: title, tiles and labels, and the stores below."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.every_command import vitsee
from tests.stores import write_sites
from tests.test_report import Outline, page_of
from vitsee_core.pages.report.cards import OTHER, Group, Headings, group_results
from vitsee_core.pages.report.materials import find_materials
from vitsee_core.pages.report.overview import overview, stores_by_model
from vitsee_core.pages.report.pictures import STEP, Addresses, pack_png
from vitsee_core.runtime.progress import SILENT

SECTIONS = {"Similarity": ["cka"], "Attention": ["attn-dist", "norms"]}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two models of six layers, compared within and with each other, and their norms."""
    folder = tmp_path_factory.mktemp("of") / "folder"
    (folder / "results").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for model in ("a", "b"):
        acts = {f"blocks.{i}.out": rng.normal(size=(12, 7, 4)) for i in range(6)}
        write_sites(folder / f"{model}.zarr", acts, model=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, stores in (("a", "a"), ("b", "b"), ("a-b", "ab"), ("last-a-b", "ab")):
            vitsee("cka", *(f"{s}.zarr" for s in stores), "-o", f"results/cka-{name}.csv")
        vitsee("norms", "a.zarr", "b.zarr", "-o", "results/norms.csv")
    yield folder


def grouped(folder: Path) -> dict[str, list[Group]]:
    found = find_materials(folder)
    with closing(Addresses({}, ())) as addresses:
        return group_results(
            found.results,
            Headings(SECTIONS, figures={}),
            folder / "r.html",
            stores={},
            left_out={},
            addresses=addresses,
            progress=SILENT,
        )


@pytest.mark.slow
def test_results_are_told_apart_by_models_and_kind(study: Path) -> None:
    (similarity,), (norms,) = grouped(study).values()
    assert [card.label for card in similarity.cards] == ["a", "b", "a × b", "last: a × b"]
    assert [card.label for card in norms.cards] == ["a, b"]
    assert [card.n_stores for card in similarity.cards] == [1, 1, 2, 2]


@pytest.mark.slow
def test_what_is_named_alike_has_the_name_of_its_file(
    study: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(study / "results", own)
    for name in ("x", "y"):
        for ending in (".csv", ".csv.json"):
            (own / f"{name}{ending}").write_bytes((own / f"cka-a{ending}").read_bytes())
    labels = [card.label for card in grouped(own)["Similarity"][0].cards]
    assert {"a (cka-a)", "a (x)", "a (y)", "b"} <= {*labels}


@pytest.mark.slow
def test_analyses_without_a_heading_come_last(study: Path) -> None:
    found = find_materials(study)
    with closing(Addresses({}, ())) as addresses:
        groups = group_results(
            found.results,
            Headings({"Rest": ["norms"]}, figures={}),
            study / "r.html",
            stores={},
            left_out={},
            addresses=addresses,
            progress=SILENT,
        )
    assert list(groups) == ["Rest", OTHER] and groups[OTHER][0].command == "cka"


@pytest.mark.slow
def test_a_tile_has_heatmaps_side_by_side_or_curves_of_all_models(study: Path) -> None:
    (similarity,), (norms,) = grouped(study).values()
    ids = [card.id for card in similarity.cards]
    assert similarity.curve == "" and similarity.pictures == ids[:2], "of one model each"
    assert norms.curve == "outlier_share_mad", (
        "what its answer is about, not the first metric"
    )
    assert [who for who, _ in similarity.answers] == ["a", "b", "a and b"], "each once"
    assert similarity.answers[2] == similarity.cards[2].answers[0]


@pytest.mark.slow
def test_a_tile_has_few_lines(study: Path) -> None:
    card = grouped(study)["Similarity"][0].cards[0]
    for n, shown in ((4, 4), (5, 5), (6, 4)):
        answers = [(str(i), "1") for i in range(n)]
        group = Group("a0", "cka", [type(card)(**{**vars(card), "answers": answers})])
        assert len(group.answers) == n and len(group.shown_answers) == shown


@pytest.mark.slow
def test_tiles_on_the_page_lead_to_their_cards(study: Path, tmp_path: Path) -> None:
    text = page_of(study, tmp_path)
    page = Outline(text)
    tiles = re.findall(r'<li class="tile.*?</a>', text, re.DOTALL)
    assert len(tiles) == 2 and text.index("How alike are the layers?") < text.index(
        "<article"
    )
    ids = {one["id"]: one for tag, one in page.tags if "id" in one}
    for one in (one for one in page.all("span") if "data-of" in one):
        assert all(f"i{card}" in ids for card in one["data-of"].split())
    for one in (one for one in page.all("span") if "data-curve" in one):
        data = json.loads("".join(page.text["script"][0]))
        charts = [chart for card in one["data-from"].split() for chart in data[card]]
        assert one["data-curve"] in [chart["key"] for chart in charts]
    assert len(page.all("img")) == 5, "no picture twice"
    words = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "Linear CKA: a" in words and "Token norms: a, b" in words, "in the contents"


# ------------------------------------------------------------------------------------ head


def told(**more: Any) -> str:
    about = {"command": ["vitsee", "study", "a b"], "models": {"vit": "x", "cnn": "y"}}
    return json.dumps({**about, "data": "photos", "train": None, "steps": {}, **more})


def test_the_head_of_a_study(study: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(study, own)
    data = find_materials(own).stores[0].record["info"].get("data", {})
    (own / "study.json").write_text(told(data=data.get("data", "")))
    head = overview(find_materials(own), "")
    assert head.title == "vit, cnn" and head.command == "vitsee study 'a b'"
    assert head.about[-3:-1] == ["2 analyses", "5 results"]
    assert re.fullmatch(r"\d{1,2} [A-Z][a-z]+ 20\d\d", head.about[-1])
    assert overview(find_materials(own), "Mine").title == "Mine"
    many = {f"m{i}": "x" for i in range(8)}
    (own / "study.json").write_text(told(models=many))
    assert overview(find_materials(own), "").title == "m0, m1, m2, m3, m4, m5 and 2 more"


def test_the_images_of_a_study(study: Path, tmp_path: Path) -> None:
    found = find_materials(study)
    for i, store in enumerate(found.stores):
        store.record["info"]["data"] = {"data": ("photos", "drawings")[i]}
        store.record["n_images"] = (1200, 34)[i]
    object.__setattr__(found, "folder", tmp_path)
    (tmp_path / "study.json").write_text(told(train="drawings"))
    expected = ["1,200 images of photos", "34 of drawings to learn classes from"]
    assert overview(found, "").about[:2] == expected
    rows = stores_by_model(found)
    assert {
        model: [(r.name, r.data, r.images) for r in some] for model, some in rows.items()
    } == {
        "a": [("a", "photos", "1,200 images")],
        "b": [("b", "drawings", "34 images")],
    }


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"models": ["a"]}', '{"models": {}}', "[" * 10**5, "\x00"]
)
def test_another_folder_has_its_name(study: Path, tmp_path: Path, text: str) -> None:
    own = tmp_path / "own"
    shutil.copytree(study, own)
    (own / "study.json").write_text(text)
    head = overview(find_materials(own), "")
    assert head.title == "own" and head.command == ""
    assert head.about[:2] == ["2 models", "12 images"]


def test_what_a_store_lacks(tmp_path: Path, make_store: Any) -> None:
    make_store("half.zarr", slabs=[0, 2]).rename(tmp_path / "half.zarr")
    ((row,),) = stores_by_model(find_materials(tmp_path)).values()
    assert row.state == "2 of 3 slabs, no self-check" and not row.sound


# ------------------------------------------------------------------------------------ pictures


def png_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    found = io.BytesIO()
    Image.fromarray(pixels).save(found, "PNG")
    return found.getvalue()


def test_a_figure_is_packed_to_within_half_a_step() -> None:
    levels = np.repeat(np.arange(256, dtype=np.uint8), 4).reshape(32, 32)
    pixels = np.stack([levels, levels.T, levels[::-1], np.full_like(levels, 255)], -1)
    png = png_of(pixels)
    data, kind = pack_png(png)
    assert kind == "image/webp" and len(data) < len(png)
    with Image.open(io.BytesIO(data)) as image:
        found = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(found - pixels[..., :3]).max() == STEP // 2
    assert {*found[pixels[..., :3] >= 254]} == {255}, "white stays white"


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    clear = np.random.default_rng(0).integers(0, 255, (8, 8, 4), dtype=np.uint8)
    one = png_of(np.zeros((1, 1, 3), np.uint8))
    for png in (png_of(clear), b"no picture", one):
        data, kind = pack_png(png)
        assert (kind == "image/png" and data == png) or len(data) < len(png)
    assert pack_png(png_of(clear))[1] == "image/png", "transparency would be lost"

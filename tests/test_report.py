"""`vitsee report`: what stands on the page, and that nothing from a file becomes a part of it."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import matplotlib.pyplot as plt
import numpy as np
import pytest
from click.testing import Result
from PIL import Image

from tests.command_line import invoke, one_line
from tests.every_command import TABLES, vitsee
from tests.stores import write_sites
from tests.tables import unique
from vitsee_core.figures.plotting import figure_bytes, stores_in_order
from vitsee_core.pages.html import json_for_html
from vitsee_core.pages.report import earlier, pictures
from vitsee_core.pages.report.captions import captions
from vitsee_core.pages.report.cards import MAX_EMBEDDED_BYTES
from vitsee_core.pages.report.charts import MAX_MARKS, charts_of
from vitsee_core.pages.report.facts import cautions, n_images
from vitsee_core.pages.report.materials import find_materials
from vitsee_core.pages.report.pictures import STEP
from vitsee_core.pages.report.redrawing import open_result
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import site_words
from vitsee_stores.errors import VitseeError

HOSTILE = "<script>pwned=1</script>\"'><img src=x onerror=pwned=1>\u202e&amp;"


def report(*args: object) -> Result:
    return invoke("report", *args)


@pytest.fixture(scope="module")
def folder(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with and without pictures, below each other, and a store."""
    found = tmp_path_factory.mktemp("study")
    (found / "deep" / "er").mkdir(parents=True)
    shutil.copytree(everything / "vit.zarr", found / "vit.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        vitsee("attn-dist", "vit.zarr", "-o", "dist.csv", "--png", "dist.png")
        vitsee("cka", "vit.zarr", "-o", "deep/er/cka.csv", "--replicates")
    return found


@pytest.fixture(scope="module")
def text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of that folder."""
    return page_of(folder, tmp_path_factory.mktemp("page"), "--title", "My study")


def page_of(folder: Path, tmp_path: Path, *options: object) -> str:
    done = report(folder, "-o", tmp_path / "page.html", *options)
    assert done.exit_code == 0, done.output
    return (tmp_path / "page.html").read_text("utf-8")


class Outline(HTMLParser):
    """What a page has: its tags with attributes, and text by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in ("img", "meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def pixels(image: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    with Image.open(io.BytesIO(image)) as opened:
        return np.asarray(opened.convert("RGB")).astype(np.int64)


def test_what_stands_on_the_page(folder: Path, text: str) -> None:
    page = Outline(text)
    assert page.text["title"] == ["My study · vitsee"]
    words = html.unescape(re.sub(r"<[^>]+>", " ", text))
    record = vitsee("info", folder / "vit.zarr", "-f", "samples_fingerprint")
    for expected in (
        "test_vit", "32 × 32 px", record[:12], "Self-check",
        "vitsee attn-dist vit.zarr -o dist.csv",
        captions()["cka"].reading, captions()["attn-dist"].source, "n = 8", "distance_px",
        "Before you read", "Some results are of few images (8)",
        "How similar layers and models are",
    ):  # fmt: skip
        assert expected in words, expected
    assert words.index("How similar layers") < words.index("Where attention looks")
    pictures = page.all("img")
    assert len(pictures) == 2 and all(len(one["alt"]) > 20 for one in pictures)
    shown = pixels(base64.b64decode(pictures[1]["src"].partition(";base64,")[2]))
    assert np.abs(shown - pixels((folder / "dist.png").read_bytes())).max() <= STEP / 2, (
        "its own figure; the other one is drawn"
    )
    assert "cka.replicates" not in text


def test_landmarks_headings_and_links(text: str) -> None:
    page = Outline(text)
    for landmark in ("main", "nav", "header", "footer"):
        assert page.all(landmark), landmark
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), "none is skipped"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len({*ids}) == len(ids)
    for link in page.all("a"):
        if link["href"].startswith("#"):
            assert link["href"][1:] in ids
    for tag in ("section", "article"):
        assert all(one["aria-labelledby"] in ids for one in page.all(tag))
    assert page.all("html")[0]["lang"] == "en"


def test_the_page_needs_nothing_and_runs_only_its_script(text: str) -> None:
    page = Outline(text)
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "poster"):
            if name in attributes:
                assert attributes[name].startswith(("data:", "#")), attributes[name][:80]
        assert not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes
    policy = next(
        m["content"] for m in page.all("meta") if "Security" in m.get("http-equiv", "")
    )
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag, which in (("script", 1), ("style", 0)):
        bodies = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(
            hashlib.sha256(bodies[which].encode()).digest()
        ).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.slow
def test_the_table_is_carried_or_linked(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [a for a in Outline(text).all("a") if "download" in a]
    carried = {a["download"]: a["href"] for a in links}
    data = unquote_to_bytes(carried["dist.csv"].removeprefix("data:text/csv,"))
    assert data == (folder / "dist.csv").read_bytes() and len(data) < MAX_EMBEDDED_BYTES
    monkeypatch.setattr("vitsee_core.pages.report.cards.MAX_EMBEDDED_BYTES", 10)
    page = page_of(folder, tmp_path)
    linked = Outline(page).all("a")
    size = human_bytes((folder / "deep" / "er" / "cka.csv").stat().st_size)
    assert f"It lies beside the page, {size}: send it along with the page." in page
    href = next(a["href"] for a in linked if a.get("download") == "cka.csv")
    assert (tmp_path / href).resolve() == (folder / "deep" / "er" / "cka.csv").resolve()
    assert "read_parquet" not in page
    (tmp_path / "large").mkdir()
    vitsee("attn-dist", folder / "vit.zarr", "-o", tmp_path / "large" / "dist.parquet")
    page = page_of(tmp_path / "large", tmp_path, "--force")
    assert 'vitsee.Table.read("dist.parquet").write("dist.csv")' in html.unescape(page)


@pytest.mark.slow
def test_where_the_page_goes(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    assert report(own).exit_code == 0 and (own / "report.html").is_file()
    for args, expected in (
        ([own], "report.html exists"),
        ([own, "-o", tmp_path / "r.pdf"], "expected a name that ends in .html"),
        ([tmp_path / "none"], "is no folder"),
    ):
        assert expected in one_line("report", *args)
    (tmp_path / "empty").mkdir()
    assert "has neither results" in one_line("report", tmp_path / "empty")
    (tmp_path / "empty" / "x.csv").write_text("a,b\n1,2\n")
    line = one_line("report", tmp_path / "empty")
    assert "has neither results" in line and "has no sidecar" in line
    assert not (tmp_path / "empty" / "report.html").exists()


@pytest.mark.slow
def test_every_command_has_a_card(
    tables_of: Callable[[str], list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Figures are drawn from the tables where no picture lies beside them; coarsely, for speed."""
    monkeypatch.setattr(pictures, "DPI", 50)
    for command in TABLES:
        for ending in (".csv", ".csv.json"):
            made = tables_of(command)[0].with_suffix(ending)
            shutil.copy(made, tmp_path / f"{command}{ending}")
    text = page_of(tmp_path, tmp_path)
    page = Outline(text)
    drawn = [one for one in page.all("img") if one["alt"]]
    assert re.findall("no figure:.*", text) == [] and len(drawn) == len(TABLES)
    assert "Other results" not in text
    tiles = [one for one in page.all("li") if one.get("class", "").startswith("tile")]
    assert len(tiles) == len(TABLES)
    seen = [one for one in page.all("span") if {"data-curve", "data-of"} & {*one}]
    own = [one for one in page.all("img") if not one["alt"]]
    assert len(seen) + len(own) == len(TABLES) and len(own) > 8
    for words in captions().values():
        shown = [html.unescape(one) for tag in ("a", "h3") for one in page.text[tag]]
        assert shown.count(words.question) == 2, "on a tile and above the card"


# ------------------------------------------------------------------------------------ hostile


def hostile_folder(everything: Path, tmp_path: Path) -> Path:
    """A folder whose store, results and sidecars have names that try to be a part of the page."""
    folder = tmp_path / "bad"
    folder.mkdir()
    label = HOSTILE.replace("/", "∕").replace("=", "≡")
    x = np.random.default_rng(0).normal(size=(8, 7, 4))
    write_sites(folder / f"{label}.zarr", {"blocks.0.out": x, "blocks.1.out": x + 1},
                model=HOSTILE, class_names=[HOSTILE, "b"], command=HOSTILE)  # fmt: skip
    vitsee("cka", folder / f"{label}.zarr", "-o", folder / "r.csv")
    sidecar = json.loads((folder / "r.csv.json").read_text())
    sidecar["command"] += [HOSTILE, "</script><script>pwned=1</script>"]
    sidecar["notes"] |= {HOSTILE: HOSTILE, "left_out": {HOSTILE: HOSTILE}}
    (folder / "r.csv.json").write_text(json.dumps(sidecar))
    (folder / f"{HOSTILE.replace('/', '∕')}.csv").write_text(f"{HOSTILE}\n1\n")
    return folder


@pytest.mark.slow
def test_nothing_from_a_file_becomes_markup(everything: Path, tmp_path: Path) -> None:
    text = page_of(hostile_folder(everything, tmp_path), tmp_path, "--title", HOSTILE)
    page = Outline(text)  # every tag closes what it should
    assert len(page.all("script")) == 2 and len(page.all("style")) == 1
    assert all(one["src"].startswith("data:") for one in page.all("img"))
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert "\u202e" not in text, "nothing turns the line around"
    data = json.loads("".join(page.text["script"][0]))
    assert "<script>" in json.dumps(data) and "<" not in page.text["script"][0]
    assert HOSTILE.replace("\u202e", r"\u202e") in page.text["title"][0]


def test_json_in_a_page() -> None:
    value = ["</script><!--", "a&b", "\u2028", 'quote"', None, 1.5]
    text = json_for_html(value)
    assert not {*"<>&\u2028"} & {*text} and json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_html(float("nan"))


@pytest.mark.slow
def test_a_strangers_sidecar_cannot_stop_the_page(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    sidecar = own / "dist.csv.json"
    told = json.loads(sidecar.read_text())
    (own / "dist.png").unlink()
    for changed in (
        {
            **told,
            "stores": 7,
            "notes": {"images": [1]},
            "figure": {"x": 1},
            "parameters": None,
        },
        {**told, "stores": [None, {"label": None}], "columns": {"value": "text"}},
        {**told, "created": {"a": 1}, "sha256": 3},
    ):
        sidecar.write_text(json.dumps(changed))
        text = page_of(own, tmp_path, "--force")
        assert "cka" in text and "dist.csv" in text


# ------------------------------------------------------------------------------------ charts


def rows_of(**columns: list[Any]) -> Table:
    names = list(columns)
    return Table.from_rows(
        [
            dict(zip(names, row, strict=True))
            for row in zip(*columns.values(), strict=True)
        ]
    )


def test_a_heatmap_has_each_value_where_it_belongs(folder: Path) -> None:
    table = Table.read(folder / "deep" / "er" / "cka.csv")
    (chart,) = charts_of(table)
    assert chart["kind"] == "heat" and chart["rows"] == chart["cols"]
    sites = unique(table, "site_a")
    assert chart["rows"] == [site_words(site) for site in sites]
    lines = csv.DictReader(io.StringIO((folder / "deep" / "er" / "cka.csv").read_text()))
    for line in lines:
        i, j = (sites.index(line[f"site_{side}"]) for side in "ab")
        value, low, high, n = chart["cells"][i][j]
        expected = [float(line[name] or "nan") for name in ("value", "low", "high")]
        assert value == pytest.approx(expected[0], rel=1e-5) and n == 8
        if line["low"]:
            assert (low, high) == pytest.approx(expected[1:], rel=1e-5)


def test_a_heatmap_of_two_stores_has_the_first_one_s_sites_down() -> None:
    table = rows_of(
        store_a=["vit"] * 6, site_a=["p"] * 3 + ["q"] * 3,
        store_b=["cnn"] * 6, site_b=["x", "y", "z"] * 2,
        metric=["cka"] * 6, value=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    )  # fmt: skip
    (chart,) = charts_of(table)
    assert (chart["title"], chart["y"], chart["x"]) == ("vit × cnn", "vit", "cnn")
    assert (chart["rows"], chart["cols"]) == (["p", "q"], ["x", "y", "z"])
    values = [[mark[0] for mark in line] for line in chart["cells"]]
    assert values == [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]


def test_curves_in_order_of_depth_one_line_for_each_setting() -> None:
    table = rows_of(
        store=["a"] * 4 + ["b"] * 2, site=["y", "x", "y", "x", "p", "q"],
        block=["y", "x"] * 2 + ["p", "q"], rel_depth=[1.0, 0.5, 1.0, 0.5, 0.0, 1.0],
        metric=["m"] * 6, token=["cls"] * 2 + ["mean"] * 4,
        value=[4.0, 3.0, 2.0, 1.0, 7.0, float("nan")], low=[3.0] * 6, n_images=[9] * 6,
    )  # fmt: skip
    (chart,) = charts_of(table)
    assert [line["name"] for line in chart["lines"]] == [
        *("a, class token", "a, mean over patches", "b, mean over patches"),
    ]
    assert chart["lines"][0]["points"] == [
        [0.5, 3.0, 3.0, None, 9.0, "x"], [1.0, 4.0, 3.0, None, 9.0, "y"]
    ]  # fmt: skip
    assert [point[1] for point in chart["lines"][2]["points"]] == [7.0], (
        "no value, no mark"
    )
    assert chart["n_marks"] == 5 and not chart["heads"]


def test_what_was_chosen_for_each_site_makes_no_line_of_its_own() -> None:
    rows: dict[str, list[Any]] = {
        "store": ["a", "a", "b", "b"], "site": ["x", "y", "p", "q"], "block": ["x", "y", "p", "q"],
        "rel_depth": [0.0, 1.0, 0.0, 1.0], "metric": ["top1"] * 4, "value": [0.1, 0.2, 0.3, 0.4],
        "l2": [1.0, 2.0, 4.0, 8.0], "token": ["cls", "cls", "mean", "mean"],
    }  # fmt: skip
    (chart,) = charts_of(rows_of(**rows))
    assert [line["name"] for line in chart["lines"]] == ["a", "b"]
    twice = {name: values * 2 for name, values in rows.items()} | {
        "l2": [1.0] * 4 + [2.0] * 4
    }
    (chart,) = charts_of(rows_of(**twice))
    assert [line["name"] for line in chart["lines"]] == [
        "a, l2 1",
        "b, l2 1",
        "a, l2 2",
        "b, l2 2",
    ]


def test_heads_are_dots_and_baselines_are_lines_of_their_own() -> None:
    heads = rows_of(
        store=["a"] * 4, site=["x", "x", "y", "y"], block=["x", "x", "y", "y"], head=[0, 1, 0, 1],
        rel_depth=[0.0, 0.0, 1.0, 1.0], metric=["m"] * 4, value=[1.0, 2.0, 3.0, 4.0],
    )  # fmt: skip
    (chart,) = charts_of(heads)
    assert chart["heads"] and chart["lines"][0]["points"][1][-2:] == ["x", "head 1"]
    scored = rows_of(
        store=["a"] * 4, site=["x", "y"] * 2, block=["x", "y"] * 2, rel_depth=[0.0, 1.0] * 2,
        metric=["top1"] * 4, value=[0.1, 0.2, 0.3, 0.3], baseline=["", "", "random", "random"],
    )  # fmt: skip
    (chart,) = charts_of(scored)
    assert [line["baseline"] for line in chart["lines"]] == [False, True]
    assert chart["lines"][1]["name"] == "a, baseline: random features"
    assert (chart["key"], chart["title"]) == ("top1", "top-1 accuracy")
    with stores_in_order(["b", "a"]):
        assert charts_of(scored)[0]["lines"][0]["colour"] == 1


def test_tables_without_a_chart() -> None:
    maps = rows_of(
        store=["a"] * 4, site=["x"] * 4, block=["x"] * 4, rel_depth=[0.0] * 4, metric=["m"] * 4,
        row=[0, 0, 1, 1], col=[0, 1, 0, 1], value=[1.0] * 4,
    )  # fmt: skip
    assert charts_of(maps) == []
    best = {"store": "a", "metric": "top1", "value": 0.5, "task": "knn"}
    places = [{"site": s, "rel_depth": d} for s, d in (("x", 0.5), ("y", 1.0))]
    assert charts_of(Table.from_rows([best | place for place in places])) == []
    assert charts_of(Table.from_rows([])) == [] and charts_of(rows_of(a=[1])) == []
    n = MAX_MARKS + 2
    many = rows_of(
        store=["a"] * n, site=[f"s{i}" for i in range(n)], block=[""] * n,
        rel_depth=[i / n for i in range(n)], metric=["m"] * n, value=[1.0] * n,
    )  # fmt: skip
    assert (
        charts_of(many) == []
        and len(charts_of(many.with_frame(many.frame.head(n - 2)))) == 1
    )


# ------------------------------------------------------------------------------------ facts


def test_the_images_behind_a_result(everything: Path) -> None:
    assert n_images(open_result(everything / "knn.csv")) == 8


@pytest.mark.slow
def test_what_a_reader_is_warned_of(
    folder: Path, tmp_path: Path, make_store: Any
) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    make_store("half.zarr", slabs=[0, 2]).rename(own / "half.zarr")
    vitsee("attn-dist", own / "half.zarr", "--allow-partial", "-o", own / "half.csv")
    rows = (own / "dist.csv").read_text().splitlines(keepends=True)
    (own / "dist.csv").write_text("".join(rows[:-1]))
    lines = "\n".join(cautions(find_materials(own)))
    assert "half is not complete: 2 of 3 slabs are committed." in lines
    assert "half.csv: made from an unfinished store (half, --allow-partial)." in lines
    assert (
        "dist.csv: table or sidecar were changed after the command had written them."
        in lines
    )
    assert "half has no self-check" in lines
    sidecar = json.loads((own / "half.csv.json").read_text())
    sidecar["stores"][0]["store_id"] = "0" * 64
    (own / "half.csv.json").write_text(json.dumps(sidecar))
    lines = "\n".join(cautions(find_materials(own)))
    assert "the store half was made anew since: these are older numbers." in lines


@pytest.mark.slow
def test_results_of_one_second_are_in_the_order_of_their_making(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    for sidecar in own.rglob("*.csv.json"):
        said = json.loads(sidecar.read_text()) | {"created": "2026-01-01T00:00:00+00:00"}
        sidecar.write_text(json.dumps(said))
    for order in (["cka", "attn-dist"], ["attn-dist", "cka"]):
        for at, command in enumerate(order):
            (made,) = (
                r.file.path for r in find_materials(own).results if r.command == command
            )
            os.utime(made, (at, at))
        assert [r.command for r in find_materials(own).results] == order


@pytest.mark.slow
def test_a_page_is_not_made_again_where_nothing_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed is: a result, the title, the code; of the figures only those that changed are
    packed again. A page that somebody changed is no source of figures."""
    own, page = tmp_path / "own", tmp_path / "page.html"
    shutil.copytree(folder, own)
    packed: list[int] = []
    pack = pictures.pack_png

    def count(png: bytes) -> tuple[bytes, str]:
        packed.append(len(png))
        return pack(png)

    monkeypatch.setattr(pictures, "pack_png", count)

    def again(*options: object) -> tuple[bool, int]:
        """Whether the page was made again, and how many figures were packed."""
        packed.clear()
        done = report(own, "-o", page, "--force", *options)
        assert done.exit_code == 0 and done.stdout == "", done.output
        return "nothing has changed since it was written" not in done.stderr, len(packed)

    assert again() == (True, 2)
    first = page.read_bytes()
    assert again() == (False, 0) and page.read_bytes() == first
    assert again("--title", "another") == (True, 0)
    assert again() == (True, 0) and page.read_bytes() == first
    dist = own / "dist.png"
    dist.write_bytes(figure_bytes(plt.figure(figsize=(1, 1)), ".png"))
    assert again() == (True, 1) and page.read_bytes() != first
    (own / "study.json").write_text('{"models": {"a": "b"}, "left_out": {"erf": "why"}}')
    assert again() == (True, 0)
    page.write_bytes(page.read_bytes().replace(b"<title>", b"<title>changed "))
    assert again() == (True, 2) and again() == (False, 0)
    monkeypatch.setattr(earlier, "worker_versions", lambda *_: {"vitsee's code": "other"})
    assert again() == (True, 2)
    shutil.rmtree(own / "vit.zarr")
    assert again() == (True, 0)


def test_materials_of_a_folder(folder: Path, tmp_path: Path) -> None:
    found = find_materials(folder)
    assert [r.command for r in found.results] == ["attn-dist", "cka"], (
        "in the order of their making"
    )
    assert [s.name for s in found.stores] == ["vit"] and found.left_out == {}
    with pytest.raises(VitseeError, match="is no folder"):
        find_materials(tmp_path / "none")

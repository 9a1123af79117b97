"""What a notebook may give and what it shows."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import pkgutil
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import vitsee_core.analyses
from vitsee_core.analyses import attn_dist
from vitsee_core.runtime.arguments import analysis
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import StoreError, VitseeError

MakeStore = Callable[..., Path]
ANALYSES = sorted(m.name for m in pkgutil.iter_modules(vitsee_core.analyses.__path__))


# ---------------------------------------------------------------- arguments


@analysis
def names(*stores: Store, sites: Sequence[str] = (), number: int = 0) -> list[Any]:
    """Labels, then sites."""
    return [*(store.label for store in stores), *sites, number]


@analysis
def pair(
    train: Store, test: Store | None = None, others: Sequence[Store] = ()
) -> list[str]:
    """Labels."""
    return [s.label for s in (train, test, *others) if s is not None]


def test_paths_and_single_texts(make_store: MakeStore) -> None:
    a, b = make_store("a.zarr"), make_store("b.zarr")
    assert names(a, str(b), sites="blocks.0.out") == ["a", "b", "blocks.0.out", 0]
    assert names(open_store(a, label="x"), b, sites=["p", "q"], number=3) == [
        "x",
        "b",
        "p",
        "q",
        3,
    ]
    assert pair(a) == ["a"]
    assert pair(train=str(a), test=b) == ["a", "b"]
    assert pair(a, others=[str(b), open_store(b, label="c")]) == ["a", "b", "c"]
    assert names.__doc__ == "Labels, then sites."


def test_refused_paths(make_store: MakeStore, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    a, same = make_store("a.zarr"), make_store("other/a.zarr")
    with pytest.raises(
        VitseeError, match=r"two stores are called 'a': .*open_store\(path, label"
    ):
        names(a, same)
    with pytest.raises(StoreError, match=r"none\.zarr"):
        names(tmp_path / "none.zarr")


@pytest.mark.parametrize("name", [n for n in ANALYSES if n != "best_layer"])
def test_every_analysis_takes_paths(name: str, tmp_path: Path) -> None:
    run = importlib.import_module(f"vitsee_core.analyses.{name}").run
    missing = str(tmp_path / "none.zarr")
    with pytest.raises(StoreError, match=r"none\.zarr"):
        if name in ("saliency", "propagate", "dense_probe"):
            run(missing, masks=tmp_path)
        elif name == "keypoints":
            run(missing, pairs=tmp_path)
        else:
            run(
                *[missing] * (2 if name in ("knn", "probe", "cka_heads", "effect") else 1)
            )


def test_an_analysis_from_a_path(make_store: MakeStore) -> None:
    path = make_store()
    expected = attn_dist.run(
        open_store(path), metrics=("distance_px",), sites=("blocks.1",)
    )
    found = attn_dist.run(path, metrics="distance_px", sites="blocks.1")
    assert len(found) == 2
    for name in expected.written.columns:
        np.testing.assert_array_equal(found[name], expected[name])


# ---------------------------------------------------------------- what is shown


class Cells(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


KNOWN_TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_a_table_is_shown() -> None:
    table = Table(
        {
            "<b>": np.array(["<script>x</script>", "&amp;"]),
            "value": np.array([0.5, np.nan]),
        }
    )
    page = Cells(table._repr_html_())
    assert set(page.tags) == KNOWN_TAGS
    assert page.cells == ["2 rows", "<b>", "value", "<script>x</script>", "0.5", "&amp;"]
    assert repr(table) == "<Table 2 rows: <b>, value>"
    long = Cells(Table({"n": np.arange(1000)})._repr_html_())
    assert long.cells[:2] == ["1000 rows", "n"]
    assert long.cells[2:] == [*map(str, range(10)), "…", *map(str, range(990, 1000))]


def test_a_store_is_shown(make_store: MakeStore) -> None:
    store = open_store(make_store("<i>.zarr"), label="<i>a</i>")
    page = Cells(store._repr_html_())
    assert set(page.tags) == KNOWN_TAGS
    assert page.cells[0].startswith("<i>a</i>: tiny, 10 images (")
    assert page.cells[1:5] == ["site", "shape", "tokens", "depth"]
    rows = [page.cells[i : i + 4] for i in range(5, len(page.cells), 4)]
    assert rows[0] == ["embed", "7x4", "cls + 2x3", "0"]
    assert ["blocks.1.in", "7x4", "= blocks.0.out", "1"] in rows
    assert ["pooled", "4", "vector", "2"] in rows


def test_samples_as_a_frame(make_store: MakeStore) -> None:
    store = open_store(make_store())
    frame = store.samples.to_pandas()
    columns = ["index", "id", "label", "split", "hash", "valid", "height", "width"]
    assert list(frame.columns) == columns
    assert frame["id"].tolist() == store.samples.id.tolist()
    assert frame.loc[3, "label"] == store.samples.label[3]
    np.testing.assert_array_equal(
        frame[["height", "width"]].to_numpy(), store.samples.size
    )


def test_a_table_as_a_frame() -> None:
    frame = Table.from_rows(
        [{"a": 1, "b": None}, {"a": 2, "b": 0.5}], notes={"n": 1}
    ).to_pandas()
    assert frame["a"].tolist() == [1, 2]
    assert frame.attrs == {"n": 1}


def test_without_pandas(monkeypatch: pytest.MonkeyPatch, make_store: MakeStore) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    store = open_store(make_store())
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(VitseeError, match=r"vitsee\[notebook\]"):
        store.samples.to_pandas()


# ---------------------------------------------------------------- the one that ships

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_look.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """What a notebook shows under a cell: its last expression. Lines for IPython are left out."""
    tree = ast.parse(
        "\n".join(line for line in source.split("\n") if not line.startswith("%"))
    )
    last = tree.body[-1]
    shown = isinstance(last, ast.Expr)
    exec(
        compile(ast.Module(tree.body[: -1 if shown else None], []), "cell", "exec"), names
    )
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell in order, over fewer images; it ships without outputs."""
    monkeypatch.chdir(tmp_path)
    page = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        source = "".join(cell["source"])
        shown.append(run_cell(source.replace("images = 200", "images = 40"), names))
    assert names["images"] == 40
    figures = [one for one in shown if isinstance(one, Figure)]
    assert len(figures) == 4 and all(figure.axes for figure in figures)
    frame = shown[-3]
    stages = [f"layer{i}.{j}.out" for i in range(1, 5) for j in range(2)]
    assert frame["site"].tolist() == ["stem", *stages]
    tables = ["distances.csv", "similarity.csv"]
    assert shown[-1] == [f"{name}{end}" for name in tables for end in ("", ".json")]

"""Groups of stores: `GROUP/NAME=store` on the command line, a panel per group in figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from tests.printed_text import flaws
from tests.test_attn_map import fake_maps
from tests.test_printing import curve
from vitsee_cli.values import parse_store
from vitsee_core.analyses import attn_dist, attn_map
from vitsee_core.analyses.normratio.token_pictures import draw_norm_ratios
from vitsee_core.figures.curve_looks import store_looks
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.groups import by_group, groups_of, split_label
from vitsee_core.tables.results import Table

MODELS = ("FS/B/16", "FS/B/8", "DINO/B/16", "DINO/S/16", "alone")


def test_labels() -> None:
    assert split_label("DINO/B/16") == ("DINO", "B/16")
    assert [split_label(text)[0] for text in ("b16", "/b16", "b16/")] == ["", "", ""]
    assert groups_of(MODELS) == ["FS", "DINO", ""]
    assert groups_of(["FS/a", "FS/b"]) == groups_of(["a", "b"]) == [""]


@pytest.mark.parametrize(
    ("text", "label", "place"),
    [
        ("FS/B/16=b16.zarr", "FS/B/16", "b16.zarr"),
        ("FS/b16=s3://bucket/b16.zarr", "FS/b16", "s3://bucket/b16.zarr"),
        ("runs/lr=0.1.zarr", "lr=0.1", "runs/lr=0.1.zarr"),  # there, as a whole
        ("runs/lr=0.2.zarr", "lr=0.2", "runs/lr=0.2.zarr"),  # nowhere
        ("b16=runs/none.zarr", "b16", "runs/none.zarr"),
    ],
)
def test_a_label_with_a_group_or_a_path(
    text: str, label: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b16.zarr", "runs/lr=0.1.zarr"):
        (tmp_path / name).mkdir(parents=True)
    found = parse_store(text)
    assert (found.label, str(found.place)) == (label, place)


def curves(metric: str = "top1") -> Table:
    made = [curve(name, 0.2 + 0.1 * i, 0.02) for i, name in enumerate(MODELS)]
    table = Table.concat(made)
    return Table(table.frame.with_columns(metric=pl.lit(metric)))


@styled
def two_metrics() -> Figure:
    table = Table.concat([curves("top1"), curves("top5")])
    return draw_depth_panels(table.frame, ["top1", "top5"])


@pytest.mark.slow
def test_a_panel_per_group_and_metric() -> None:
    figure = two_metrics()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") for axes in shown]
    assert titles == ["FS", "DINO", "no group"] * 2
    looks = [
        [
            (line.get_color(), line.get_linestyle())
            for line in axes.lines
            if np.size(line.get_xdata())
        ]
        for axes in shown[:3]
    ]
    (b16, b8), (same, s16), _ = looks
    assert b16 == same  # of one name and variant
    assert b8[0] == b16[0] and b8[1] != b16[1]  # another variant of the name
    assert s16[0] != b16[0] and s16[1] == b16[1]
    assert len({axes.get_ylim() for axes in shown[:3]}) == 1
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:4] == ["B/16", "B/8", "S/16", "alone"]
    assert flaws(figure) == []


def test_looks_without_groups_are_by_store() -> None:
    table = Table.concat([curve("a", 0.2, 0.01), curve("b", 0.3, 0.01)]).frame
    assert [*store_looks(table)] == ["a", "b"]
    assert len({look["color"] for look in store_looks(table).values()}) == 2
    assert [group for group, _ in by_group(table)] == [""]


@pytest.mark.slow
def test_attention_distances_of_groups_are_their_means() -> None:
    rows = [
        {"store": store, "site": f"blocks.{b}", "depth": b, "rel_depth": b / 2, "head": h,
         "metric": "distance_unit", "value": 0.1 * (b + h + i), "low": 0.0, "high": 1.0,
         "n_images": 9}
        for i, store in enumerate(MODELS) for b in range(3) for h in range(2)
    ]  # fmt: skip
    figure = attn_dist.plot(Table.from_rows(rows))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "FS",
        "DINO",
        "no group",
    ]
    (first, second) = figure.axes[0].lines[:2]
    assert np.allclose(first.get_ydata(), [0.05, 0.15, 0.25])  # the mean of two heads
    assert np.allclose(second.get_ydata(), [0.15, 0.25, 0.35])
    assert flaws(figure) == []


@pytest.mark.slow
def test_sinks_of_groups_are_the_means_of_their_layers() -> None:
    metrics = ("sink_max", "sink_share", "qk_nmi")
    rows = [
        {"store": store, "site": f"blocks.{b}", "depth": b, "rel_depth": b / 2, "token": token,
         "head": h, "metric": metric, "value": b + 2.0 * h, "low": 0.0, "high": 9.0, "n_images": 9}
        for store in MODELS for metric in metrics for b in range(3) for h in range(2)
        for token in ((None, "patches") if metric == "sink_share" else (None,))
    ]  # fmt: skip
    figure = attn_map.plot(Table.from_rows(rows))
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == ["FS", "DINO", "no group"] * 3
    assert np.asarray(figure.axes[0].lines[0].get_ydata()).tolist() == [1, 2, 3]
    assert flaws(figure) == []


@pytest.mark.slow
def test_skips_of_many_models_have_a_panel_per_token() -> None:
    rows = [
        {"store": f"m{i}", "site": f"blocks.{b}.{kind}", "depth": b, "rel_depth": b / 2,
         "token": token, "row": None, "col": None, "metric": "norm_ratio", "value": 1.0 + i + b,
         "low": 0.5 + i + b, "high": 1.5 + i + b, "n_images": 9}
        for i in range(8) for b in range(3) for kind in ("attn", "mlp")
        for token in ("cls", "patches")
    ]  # fmt: skip
    figure = draw_norm_ratios(Table.from_rows(rows))
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert sorted(titles) == sorted(
        f"{token}, {kind}"
        for token in ("class token", "patches")
        for kind in ("attention", "MLP")
    )
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name for name in names if name.startswith("m")] == [f"m{i}" for i in range(8)]
    assert flaws(figure) == []


def maps_of(n_layers: int, n_heads: int, images: list[str]) -> Table:
    """Maps of every store of `MODELS`, of single images where there are any."""
    tables = []
    for store in MODELS:
        rows = fake_maps(n_layers, n_heads, (4, 4), "mean_cls")
        own = rows.frame.with_columns(store=pl.lit(store))
        for image in images:
            more = {"image": image, "token": "cls", "metric": "attention"}
            tables.append(
                own.with_columns(**{name: pl.lit(cell) for name, cell in more.items()})
            )
        if not images:
            tables.append(own)
    return Table.concat(tables)


@pytest.mark.slow
def test_models_side_by_side() -> None:
    """Walmer et al. 2023, Figs. 2, 17, 18."""
    figure = attn_map.plot(maps_of(3, 2, []))
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == [*MODELS]
    assert figure.get_figheight() < figure.get_figwidth()
    assert flaws(figure) == []


def test_images_by_models() -> None:
    """Walmer et al. 2023, Fig. 13: one head of each model, a line per image."""
    figure = attn_map.plot(maps_of(1, 1, ["0", "1"]))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 2 * (1 + len(MODELS))
    assert [axes.get_title() for axes in shown[: len(MODELS) + 1]] == ["", *MODELS]
    tops = [round(axes.get_position().y1, 3) for axes in shown]
    assert len({*tops[:6]}) == len({*tops[6:]}) == 1 and tops[0] > tops[6]
    assert flaws(figure) == []


@pytest.mark.slow
def test_heads_of_an_image_by_models() -> None:
    """Walmer et al. 2023, Figs. 11, 12: all heads of each model below the picture."""
    figure = attn_map.plot(maps_of(2, 2, ["0"]))
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == ["0", *MODELS]
    assert flaws(figure) == []

"""What tables answer in one line, against lines written by hand for tables written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.every_command import TABLES
from vitsee_core.figures.panels import new_figure
from vitsee_core.figures.plotting import styled
from vitsee_core.pages.report.captions import headline
from vitsee_core.runtime import registry
from vitsee_core.tables.headlines import (
    margin,
    measured,
    number,
    observations,
    picked,
    said_once,
)
from vitsee_core.tables.results import Table

SITES = [f"blocks.{i}.out" for i in range(6)]


def of(analysis: str, table: Table) -> list[tuple[str, str]]:
    return headline(registry.load(analysis), table)


def rows(
    metric: str, values: list[float], store: str = "vit", **more: Any
) -> list[dict[str, Any]]:
    """A row per site from input to output, given in the other order."""
    last = max(len(values) - 1, 1)
    found = [
        {
            "store": store,
            "site": site,
            "rel_depth": i / last,
            "metric": metric,
            "value": value,
        }
        for i, (site, value) in enumerate(zip(SITES, values, strict=False))
    ]
    return [row | more for row in reversed(found)]


def table_of(*parts: list[dict[str, Any]]) -> Table:
    every = [row for part in parts for row in part]
    return Table.from_rows(
        every, list(dict.fromkeys(name for row in every for name in row))
    )


def test_too_few_images_are_said_once() -> None:
    few = "(of 4 images: too few to conclude from)"
    lines = [
        ("a", f"1.0 {few} px at embed, 2 {few} px at last"),
        ("b", f"3 {few} px at embed"),
    ]
    without = [("a", "1.0 px at embed, 2 px at last"), ("b", "3 px at embed")]
    assert said_once(lines) == (without, "of 4 images: too few to conclude from")
    assert said_once(lines[:1]) == (without[:1], "of 4 images: too few to conclude from")
    for other in (
        "5 at last",
        f"5 {few.replace('4 im', '8 im')}",
    ):  # not all of them alike
        mixed = [*lines, ("c", other)]
        once = ("a", f"1.0 px at embed, 2 px at last {few}")
        assert said_once(mixed) == ([once, lines[1], ("c", other)], "")
    assert said_once([]) == ([], "")
    assert said_once([("a", "1"), ("b", "2")]) == ([("a", "1"), ("b", "2")], "")


def test_numbers() -> None:
    shown = {
        0.71234: "0.712",
        15.58: "15.6",
        123.4: "123",
        1234.5: "1,234",
        -0.05: "-0.0500",
    }
    assert {value: number(value) for value in shown} == shown and number(0) == "0"
    assert number(math.nan) == "none" and number(999.6) == "1,000"


def test_a_value_with_and_without_its_interval() -> None:
    table = table_of(
        [{"value": 0.5, "low": 0.25, "high": 0.75}, {"value": 1.0, "low": None}]
    ).frame
    assert (
        measured(table, 0) == "0.500 (95 %: 0.250 to 0.750)"
        and measured(table, 1) == "1.00"
    )


def test_few_observations_are_said_in_place_of_the_interval() -> None:
    row = {"metric": "massive_ratio", "value": 314.0, "low": -918.0, "high": 1546.0}
    few = table_of(
        [row | {"n_images": 2}, row | {"n_images": 10, "low": 150.0, "high": 470.0}]
    ).frame
    assert measured(few, 0) == "314 (of 2 images: too few to conclude from)"
    assert measured(few, 1) == "314 (95 %: 150 to 470; 10 images)", "wider than the value"
    assert measured(
        table_of([row | {"n_images": 50, "low": 300.0, "high": 330.0}]).frame
    ) == ("314 (95 %: 300 to 330)")
    videos = table_of([row | {"n_videos": 4, "n_images": 400}]).frame
    assert measured(videos) == "314 (of 4 videos: too few to conclude from)"
    assert margin(few.head(1)) == " (of 2 images: too few to conclude from)"
    assert margin(few) == " (95 %: ± 1,232 at most)", "some value is of ten"
    assert observations(table_of([row]).frame) == (math.inf, "images")


def test_metrics_that_depend_on_the_number_of_images_say_it() -> None:
    row = {"value": 12.3, "low": 11.9, "high": 12.7, "n_images": 1000}
    table = table_of(
        [{"metric": name} | row for name in ("effective_rank", "norm")]
    ).frame
    assert measured(table, 0) == "12.3 (95 % at 1,000 images: 11.9 to 12.7)"
    assert measured(table, 1) == "12.3 (95 %: 11.9 to 12.7)"


@pytest.mark.parametrize(
    ("n", "foot"), [(9, "of 9 images: too few to conclude from"), (10, "")]
)
def test_a_figure_of_few_images_says_so(n: int, foot: str) -> None:
    @styled
    def plot(table: Table) -> Any:
        return new_figure(3, 2)

    label = plot(table_of([{"value": 0.5, "n_images": n}]))._supxlabel
    assert (label.get_text() if label else "") == foot


def test_rows_are_picked_by_what_cells_have() -> None:
    table = table_of(
        [{"metric": "m", "value": 1.0, "token": ""}, {"metric": "m", "value": 2.0, "token": "cls"},
         {"metric": "m", "value": math.nan, "token": ""}, {"metric": "n", "value": 3.0}],
    )  # fmt: skip
    assert picked(table, metric="m", token=None, image=None)["value"].to_list() == [1.0]
    assert picked(table, metric=("m", "n"))["value"].to_list() == [1.0, 2.0, 3.0]
    assert len(picked(table, lacking="x")) == 0


# ------------------------------------------------------------------------------------ scores


def test_the_best_layer_its_ties_its_setting_and_its_rivals() -> None:
    table = table_of(
        rows("top1", [0.25, 0.75, 0.75], k=5, low=0.5, high=1.0),
        rows("top1", [0.5, 0.5, 0.5], k=20),
        rows("top1", [0.25, 0.125, 0.25], k=5, baseline="random"),
        rows("top1", [0.9, 0.25, 0.1], k=5, baseline="shuffled"),
        rows("top5", [1.0, 1.0, 1.0]),
        rows("top1", [0.99], **{"class": "cat"}),
        rows("top1", [math.nan, 0.5], store="cnn"),
    )
    assert of("knn", table) == [
        (
            "vit",
            "best at blocks.1.out (as blocks.2.out): 0.750 (95 %: 0.500 to 1.00) of the images "
            "right, k 5; shuffled 0.250",
        ),
        ("cnn", "best at blocks.1.out: 0.500 of the images right"),
    ]


def test_a_bound_is_no_rival() -> None:
    table = table_of(
        rows("pck@0.1", [0.25, 0.5]),
        rows("pck@0.1", [0.1, 0.125], baseline="still"),
        rows("pck@0.1", [1.0, 1.0], baseline="grid"),
    )
    assert of("keypoints", table) == [
        (
            "vit",
            "best at blocks.1.out: 0.500 PCK at 0.1; still 0.125; the grid allows 1.00",
        )
    ]


@pytest.mark.parametrize(
    ("analysis", "metric", "unit"),
    [("probe", "top1", "of the images right"), ("cluster", "purity", "purity"),
     ("propagate", "jf", "mean of J and F"), ("retrieve", "map", "mAP")],
)  # fmt: skip
def test_scores_have_a_best_layer(analysis: str, metric: str, unit: str) -> None:
    table = table_of(rows(metric, [0.25, 0.5, 0.125]), rows("other", [1.0, 1.0, 1.0]))
    assert of(analysis, table) == [("vit", f"best at blocks.1.out: 0.500 {unit}")]


def test_the_lens_becomes_right_somewhere() -> None:
    table = table_of(
        rows("lens_top1", [0.1, 0.89, 0.91, 1.0]), rows("lens_rank", [9.0, 2, 1, 1])
    )
    assert of("lens", table) == [
        ("vit", "share of images right: 0.100 at blocks.0.out, 1.00 at blocks.3.out; blocks.2.out "
         "is the first with 0.9 of the last")
    ]  # fmt: skip


def test_layers_that_are_best_at_most_tasks() -> None:
    best = [{"store": "vit", "site": site, "value": 1.0} for site in ("a", "b", "b")]
    table = table_of(
        best, [{"store": "vit", "site": "c", "value": 1.0, "baseline": "random"}]
    )
    assert of("best_layer", table) == [("vit", "best at 3 tasks: b 2 times, a 1")]


# ------------------------------------------------------------------------------------ pairs


def pair(a: str, b: str, value: float, **more: Any) -> dict[str, Any]:
    (store_a, site_a), (store_b, site_b) = a.split(":"), b.split(":")
    sides = {"store_a": store_a, "site_a": site_a, "store_b": store_b, "site_b": site_b}
    return sides | {"metric": "cka", "value": value} | more


def test_similarity_within_a_model() -> None:
    value = {(0, 1): 0.9, (0, 2): 0.6, (1, 2): 0.9, (3, 4): 0.5, (3, 5): 0.3, (4, 5): 0.4}
    table = table_of(
        [pair(f"vit:{i}", f"vit:{j}", 1.0 if i == j else value.get((min(i, j), max(i, j)), 0.125))
         for i in range(6) for j in range(6)]
    )  # fmt: skip
    assert of("cka", table) == [
        ("vit", "first 3 layers 0.800, last 3 layers 0.400, first with last layer 0.125")
    ]
    few = [
        pair(f"vit:{i}", f"vit:{j}", 1.0 - 0.5 * (i != j))
        for i in range(2)
        for j in range(2)
    ]
    assert of("cka", table_of(few)) == [("vit", "first with last layer 0.500")]


def test_similarity_of_two_models_each_pair_once() -> None:
    table = table_of(
        [pair("a:x", "b:p", 0.25), pair("a:y", "b:p", 0.5, low=0.4, high=0.6),
         pair("b:p", "a:x", 0.25), pair("a:x", "c:q", 0.75), pair("c:q", "c:q", 1.0)]
    )  # fmt: skip
    assert of("cka", table) == [
        ("a and b", "most alike are y and p: 0.500 (95 %: 0.400 to 0.600)"),
        ("a and c", "x and q: 0.750"),
    ]


def test_other_measures_but_no_distance() -> None:
    table = table_of(
        [
            pair("a:x", "b:p", 3.0, metric="gulp"),
            pair("a:x", "b:p", 0.5, metric="mutual_knn"),
        ]
    )
    assert of("similarity", table) == [("a and b", "mutual k-NN, x and p: 0.500")]
    assert of("similarity", table.filter(metric="gulp")) == []


def test_local_and_global_heads_with_the_lowest_site() -> None:
    table = table_of(
        [pair("vit:h", "cnn:stem", 0.5, distance_px=18.0),
         pair("vit:h", "cnn:top", 0.1, distance_px=9.0),
         pair("vit:h", "cnn:stem", 0.75, distance_px=9.0, low=0.7, high=0.8)]
    )  # fmt: skip
    assert of("cka_heads", table) == [
        ("vit and cnn", "CKA with stem 0.750 (95 %: 0.700 to 0.800) for heads at 9.00 px, 0.500 "
         "for heads at 18.0 px")
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ attention


def test_the_nearest_and_the_farthest_head() -> None:
    near = rows("distance_relative", [0.25, 0.5, 0.75], head=0, low=0.0, high=1.0)
    far = rows("distance_relative", [1.0, 0.5, 0.875], head=1, low=0.5, high=1.0)
    for part in (near, far):  # of the block between nothing is said
        part[1] |= {"low": -9.0, "high": 9.0}
    in_px = rows("distance_px", [4.0, 8.0, 12.0], head=0)
    said = "heads of blocks.0.out 0.250 to 1.00, heads of blocks.2.out 0.750 to 0.875"
    assert of("attn_dist", table_of(in_px, near, far)) == [
        ("vit", f"{said} times as far as uniform attention (95 %: ± 0.500 at most)")
    ]
    assert of("attn_dist", table_of(in_px)) == [
        (
            "vit",
            "heads of blocks.0.out 4.00 to 4.00, heads of blocks.2.out 12.0 to 12.0 px",
        )
    ]


def test_where_attention_ends_up() -> None:
    sinks = table_of(
        rows("sink_max", [1.0, 12.0], head=3), rows("sink_max", [2.0, 3.0], head=1)
    )
    assert of("attn_map", sinks) == [
        (
            "vit",
            "the strongest key draws 12.0 times an even share (head 3 of blocks.1.out)",
        )
    ]
    cells = [
        row | {"value": 0.1 if row["site"] == SITES[0] else 0.2 if 0 < i < 3 and 0 < j < 3 else 0.1}
        for i in range(4) for j in range(4) for row in rows("mean_cls", [1.0, 1.0], row=i, col=j)
    ]  # fmt: skip
    assert of("attn_map", table_of(cells)) == [
        ("vit", "in blocks.1.out the middle of the grid gets 0.400 of the attention to patches, by "
         "its size 0.250")
    ]  # fmt: skip
    heads = table_of(
        rows("entropy", [1.0, 2.0], head=0), rows("entropy", [2.0, 4.0], head=1)
    )
    assert of("attn_map", heads) == [
        ("vit", "1.50 at blocks.0.out, 3.00 at blocks.1.out nats, mean over heads")
    ]


def test_types_of_heads() -> None:
    table = table_of(
        rows("same_type_thresholds", [1.0, 0.5], head=0, type="global"),
        rows("same_type_thresholds", [1.0], head=1, type="strict local"),
        rows("self_mass", [0.1, 0.2], head=0, type="global"),
    )
    assert of("head_types", table) == [
        (
            "vit",
            "of 3 heads 2 global, 1 strict local; 2 keep their type at every threshold tried",
        )
    ]


def test_the_best_head_beside_maps_that_do_not_look() -> None:
    table = table_of(
        rows("iou", [0.25, 0.5], best="head", head=2), rows("iou", [0.75, 0.75], head=0),
        [{"store": "vit", "site": "", "rel_depth": None, "metric": "iou", "value": value,
          "baseline": name} for name, value in (("random", 0.125), ("centre", 0.625))],
    )  # fmt: skip
    assert of("saliency", table) == [
        ("vit", "the best head covers them to an IoU of 0.500, in blocks.1.out; without looking "
         "(centre) 0.625")
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ flow


@pytest.mark.parametrize(
    ("analysis", "metric", "more", "expected"),
    [
        ("erf", "radius50_px", {}, "half of the response within 2.00 px at blocks.0.out, 8.00 px"),
        ("pca", "explained_variance", {"component": 1},
         "share of the first component: 2.00 at blocks.0.out, 8.00"),
        ("spatial", "lds", {}, "cosine of near patches above distant ones 2.00 at blocks.0.out"
         ", 8.00"),
    ],
)  # fmt: skip
def test_first_and_last(
    analysis: str, metric: str, more: dict[str, Any], expected: str
) -> None:
    table = table_of(
        rows(metric, [2.0, 4.0, 8.0], **more), rows("gradient", [1.0], row=0, col=0)
    )
    assert of(analysis, table) == [("vit", f"{expected} at blocks.2.out")]


def test_all_patches_alike() -> None:
    table = table_of(rows("lds", [0.5]), rows("mean_cos", [0.25, 0.75]))
    assert of("spatial", table) == [
        ("vit", "cosine of near patches above distant ones 0.500 at blocks.0.out; all patches "
         "0.750 at blocks.1.out")
    ]  # fmt: skip


def test_tokens_that_are_like_their_own_patch() -> None:
    table = table_of(
        rows("own_top1", [1.0, 0.5]), rows("own_top1", [0.1, 0.125], baseline="chance"),
        rows("own_margin", [0.5, 0.25], low=0.2, high=0.3),
    )  # fmt: skip
    assert of("localize", table) == [
        ("vit", "at blocks.1.out 0.500 of the tokens are most like their own patch (chance 0.125); "
         "CKA with it less that with the next: 0.250 (95 %: 0.200 to 0.300)")
    ]  # fmt: skip


def test_skips_by_kind_of_token() -> None:
    table = table_of(
        rows("norm_ratio", [4.0, 2.0, 8.0], token="cls"), rows("cos_out", [1.0, 1.0, 1.0]),
        rows("norm_ratio", [3.0, 2.0, 2.5], token="patches"),
        rows("norm_ratio", [99.0], token="0,0", row=0, col=0),
    )  # fmt: skip
    assert of("normratio", table) == [
        (
            "vit, cls",
            "skip over branch: from 2.00 at blocks.1.out to 8.00 at blocks.2.out",
        ),
        (
            "vit, patches",
            "skip over branch: from 2.00 at blocks.1.out to 3.00 at blocks.0.out",
        ),
    ]


def test_outliers_and_massive_activations() -> None:
    table = table_of(
        rows("outlier_share_mad", [0.0, 0.25], token="patches"),
        rows("outlier_share_mad", [0.9], token="patches", row=0, col=0),
        rows("massive_ratio", [500.0, 10.0]),
    )
    assert of("norms", table) == [
        ("vit", "at most 0.250 of patches are outliers at blocks.1.out; largest activation "
         "500 times the median at blocks.0.out")
    ]  # fmt: skip


def test_ranks_of_the_first_kind_of_token() -> None:
    table = table_of(
        rows("effective_rank", [20.0, 10.0], token="cls", cap=96.0),
        rows("effective_rank", [90.0, 80.0], token="mean", cap=96.0),
    )
    assert of("spectrum", table) == [
        (
            "vit",
            "10.0 of at most 96 at blocks.1.out (effective rank); most at blocks.0.out, 20.0",
        )
    ]


def test_components_of_the_filters() -> None:
    shares = [0.5, 0.85, 0.95, 1.0]
    cells = [{"store": "vit", "component": i, "metric": "variance_cumulative", "value": value}
             for i, value in enumerate(shares)]  # fmt: skip
    assert of("weights", table_of(cells)) == [
        ("vit", "3 principal components of the filters have 0.950 of their variance")
    ]
    assert of("weights", table_of(cells[:2])) == [
        ("vit", "2 principal components of the filters have 0.850 of their variance")
    ]


# ------------------------------------------------------------------------------------ all


@pytest.mark.parametrize("analysis", [name.replace("-", "_") for name in TABLES])
def test_tables_without_the_rows_make_no_answer(analysis: str) -> None:
    of_pairs = [pair("a:x", "b:p", 0.25, metric="another")]
    for table in (table_of([]), table_of(rows("another", [1.0, 2.0]), of_pairs)):
        assert analysis == "best_layer" or of(analysis, table) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_what_commands_write_is_answered(
    tables_of: Callable[[str], list[Path]], command: str
) -> None:
    name = command.replace("-", "_")
    found = [
        answer for path in tables_of(command) for answer in of(name, Table.read(path))
    ]
    assert found or registry.load(name).headline is None
    for who, text in found:
        assert (
            who
            and any(map(str.isdigit, text))
            and "nan" not in text
            and "none" not in text
        )

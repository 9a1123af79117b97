"""The grammar of sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.random_stores import VIT, flat_site, tokens_site
from tests.stores import write_labelled
from vitsee_stores import SiteError, SiteSpec, open_store
from vitsee_stores.layout import select_names

SITES = [
    tokens_site("embed", VIT),
    *(
        site
        for i in range(11)
        for site in (
            tokens_site(
                f"blocks.{i}.in",
                VIT,
                groups=("residual",),
                alias_of="embed" if i == 0 else f"blocks.{i - 1}.out",
            ),
            tokens_site(f"blocks.{i}.norm1", VIT, groups=("norms",)),
            tokens_site(f"blocks.{i}.out", VIT, groups=("blocks", "residual")),
        )
    ),
    tokens_site("norm", VIT, groups=("head", "norms")),
    flat_site("logits", "vector", (5,)),
]
STAGES = [
    tokens_site(f"stages.{s}.blocks.{b}.out", VIT)
    for s, n in ((0, 2), (1, 3))
    for b in range(n)
]


def names(*patterns: str, sites: list[SiteSpec] = SITES) -> list[str]:
    return [site.name for site in select_names(patterns, sites)]


def test_names_globs_and_order() -> None:
    assert names("norm", "embed") == ["embed", "norm"]
    assert names("blocks.1*.out") == ["blocks.1.out", "blocks.10.out"]
    assert names("blocks.[23].norm?") == ["blocks.2.norm1", "blocks.3.norm1"]
    assert names("blocks.3.out", "blocks.3.*") == [
        "blocks.3.in",
        "blocks.3.norm1",
        "blocks.3.out",
    ]


def test_groups_list_stored_names() -> None:
    assert names("blocks") == ["embed", *(f"blocks.{i}.out" for i in range(11))]
    assert names("head") == ["norm", "logits"]
    assert not any(name.endswith(".in") for name in names("residual"))
    assert names("all") == [site.name for site in SITES if site.alias_of is None]


def test_aliases() -> None:
    assert names("blocks.2.in") == ["blocks.2.in"]
    assert names("blocks.*.in")[:2] == ["blocks.0.in", "blocks.1.in"]
    assert names("*") == names("all"), "equal tensors once"
    assert names("*", "blocks.2.in") == sorted(
        [*names("all"), "blocks.2.in"], key=[site.name for site in SITES].index
    )


def test_ranges() -> None:
    assert names("blocks.3..5.out") == [f"blocks.{i}.out" for i in (3, 4, 5)]
    assert names("blocks.9..10.out,!blocks.10..10.out") == ["blocks.9.out"]
    for pattern, phrase in (
        ("blocks.5..3.out", "is no range; expected two numbers"),
        ("blocks.0..999999.out", "is no range"),
        ("blocks.10..11.out", "no site matches 'blocks.11.out'"),
    ):
        with pytest.raises(SiteError, match=phrase):
            names(pattern)


def test_from_the_end() -> None:
    assert names("blocks.-1.out") == ["blocks.10.out"]
    assert names("blocks.-11.norm1") == ["blocks.0.norm1"]
    assert names("blocks.-2.*") == ["blocks.9.in", "blocks.9.norm1", "blocks.9.out"]
    assert names("stages.-1.blocks.-1.out", sites=STAGES) == ["stages.1.blocks.2.out"]
    assert names("stages.*.blocks.-1.out", sites=STAGES) == [
        "stages.0.blocks.1.out",
        "stages.1.blocks.2.out",
    ]
    assert names("stages.*.blocks.-3.out", sites=STAGES) == ["stages.1.blocks.0.out"]


def placed(*paths: str, entrance: str = "embed", **more: object) -> list[SiteSpec]:
    """A model's table: the entrance, of each block an `in` and an `out`, and what follows."""
    top = len(paths)
    table = [tokens_site(entrance, VIT)]
    for i, path in enumerate(paths):
        table.append(
            dataclasses.replace(
                tokens_site(f"{path}.in", VIT, depth=i),
                rel_depth=i / max(top - 1, 1),
                block=path,
            )
        )
        out = tokens_site(f"{path}.out", VIT, depth=i + 1)
        table.append(
            dataclasses.replace(out, rel_depth=(i + 1) / top, part="out", block=path)
        )
    return [*table, flat_site("logits", "vector", (5,))]


PLACED = placed(*(f"blocks.{i}" for i in range(4)))
RESNET = placed(
    "layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer3.1", entrance="stem"
)
SWIN = placed(*(f"layers.{s}.blocks.{b}" for s in range(3) for b in range(2)))
EFFICIENT = placed("blocks.0.0", "blocks.1.0", "blocks.1.1")


def test_the_ends_are_blocks_outputs() -> None:
    assert names("first", sites=PLACED) == ["blocks.0.out"]
    assert names("last", sites=PLACED) == ["blocks.3.out"]
    assert names("first", "last", sites=RESNET) == ["layer1.0.out", "layer3.1.out"]
    held = [
        site for site in PLACED if site.block != "blocks.3"
    ]  # a store without the last block
    with pytest.raises(SiteError, match="no site matches 'last'"):
        names("last", sites=held)
    with pytest.raises(SiteError, match="no site matches 'first'"):
        names("first", sites=PLACED[3:])


@pytest.mark.parametrize(
    ("place", "block"),
    # rel_depth is 1/4, 2/4, 3/4, 1: of equal distances (here 3/8) the earlier
    [
        ("0", 0),
        ("0.25", 0),
        ("0.37", 0),
        ("0.375", 0),
        ("0.38", 1),
        ("0.5", 1),
        ("1.0", 3),
    ],
)
def test_the_nearest_depth(place: str, block: int) -> None:
    assert names(f"depth:{place}", sites=PLACED) == [f"blocks.{block}.out"]


def test_a_tie_of_thirds_goes_to_the_earlier() -> None:
    three = placed("blocks.0", "blocks.1", "blocks.2")
    assert abs(2 / 3 - 0.5) < abs(1 / 3 - 0.5), "by their rounding errors"
    assert names("depth:0.5", sites=three) == ["blocks.0.out"]


@pytest.mark.parametrize("place", ["", "x", "1.1", "-0.1", "nan", "inf", "50%"])
def test_a_place_is_a_number_from_0_to_1(place: str) -> None:
    with pytest.raises(SiteError, match="expected depth:F with F from 0 to 1"):
        names(f"depth:{place}", sites=PLACED)


def test_the_last_output_of_a_stage() -> None:
    assert names("stage:0", sites=RESNET) == ["layer1.1.out"]
    assert names("stage:1", sites=RESNET) == ["layer2.0.out"]
    assert names("stage:-1", sites=RESNET) == ["layer3.1.out"]
    assert names("stage:0", "stage:2", sites=SWIN) == [
        "layers.0.blocks.1.out",
        "layers.2.blocks.1.out",
    ]
    assert names("stage:1", sites=EFFICIENT) == ["blocks.1.1.out"]
    # A store that begins at the third stage calls it what the model does.
    held = [site for site in RESNET if (site.block or "").startswith("layer3")]
    assert names("stage:2", sites=held) == ["layer3.1.out"]
    with pytest.raises(
        SiteError, match=r"no stage matches 'stage:0'; stages of this model: 2"
    ):
        names("stage:0", sites=held)


def test_stages_that_are_not_there() -> None:
    for sites in (PLACED, placed("layers.0.blocks.0", "layers.0.blocks.1")):
        with pytest.raises(
            SiteError, match="this model has no stages; name a place by depth:F"
        ):
            names("stage:0", sites=sites)
    for stage in ("3", "-4"):
        with pytest.raises(
            SiteError, match=f"no stage matches 'stage:{stage}'; .*: 0, 1, 2$"
        ):
            names(f"stage:{stage}", sites=RESNET)
    with pytest.raises(SiteError, match="'stage:last' is no stage"):
        names("stage:last", sites=RESNET)


def test_places_of_blocks_and_sublayers() -> None:
    """Tables without parts: what belongs to the block at that place."""
    sublayers = [
        dataclasses.replace(
            tokens_site(f"blocks.{i}.{kind}", VIT), part="", block=f"blocks.{i}",
            depth=2 * i + j, rel_depth=(2 * i + j) / 5,
        )
        for i in range(3)
        for j, kind in enumerate(("attn", "mlp"))
    ]  # fmt: skip
    assert names("first", sites=sublayers) == ["blocks.0.attn", "blocks.0.mlp"]
    assert names("last", sites=sublayers) == ["blocks.2.attn", "blocks.2.mlp"]
    assert names("depth:0.5", sites=sublayers) == ["blocks.1.attn", "blocks.1.mlp"]


def test_comma_lists_and_what_is_left_out() -> None:
    assert names("norm,embed", "logits") == ["embed", "norm", "logits"]
    assert names("blocks, !embed ,!blocks.[1-9].out") == ["blocks.0.out", "blocks.10.out"]
    assert names("blocks.[0,1].out") == ["blocks.0.out", "blocks.1.out"], (
        "no list within brackets"
    )
    assert names("!head", "all") == [
        n for n in names("all") if n not in ("norm", "logits")
    ]
    assert names("blocks.*.in,!blocks.0.out")[:2] == ["blocks.0.in", "blocks.1.in"]
    assert names("*,!last", sites=PLACED)[-2:] == ["blocks.3.in", "logits"]


@pytest.mark.parametrize(
    "pattern", ["norm,", ",norm", "norm,hidden", "norm,!nomr", "norm,!"]
)
def test_each_of_a_list_has_to_match(pattern: str) -> None:
    with pytest.raises(SiteError, match=r"no site matches '(|hidden|nomr)'"):
        names(pattern)


def test_something_has_to_be_left() -> None:
    with pytest.raises(
        SiteError, match=r"^!norm,!embed leaves no site; .* as in 'all,!norm'$"
    ):
        names("!norm,!embed")
    with pytest.raises(SiteError, match=r"^norm,!head leaves no site$"):
        names("norm", "!head")


@pytest.mark.parametrize(
    "pattern",
    ["blokcs.*", "BLOCKS.0.out", "blocks.-12.out", "blocks.11.out", "hidden", "", "-1"],
)
def test_nothing_matches(pattern: str) -> None:
    with pytest.raises(SiteError) as error:
        names("embed", pattern)
    said = str(error.value)
    assert said.startswith(
        f"no site matches {pattern!r}; sites of this model: embed, blocks.0.in,"
    )
    assert said.endswith("... (36 in all) (run: vitsee sites MODEL)")


def test_no_pattern_is_refused(make_store: Callable[..., Path]) -> None:
    """An empty list is a mistake of the caller, and no choice of nothing."""
    with pytest.raises(SiteError, match="no site was asked for"):
        select_names([], SITES)
    store = open_store(make_store())
    with pytest.raises(SiteError, match="no site was asked for"):
        store.select([])


@pytest.mark.parametrize(("order", "shuffled"), [("dataset", False), ("shuffled", True)])
def test_whether_rows_are_shuffled(order: str, shuffled: bool, tmp_path: Path) -> None:
    assert (
        write_labelled(
            tmp_path / "a.zarr", {"embed": np.ones((4, 3, 4))}, [0, 1] * 2, order=order
        ).shuffled
        is shuffled
    )

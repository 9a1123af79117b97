"""The grammar of sites."""

from __future__ import annotations

import pytest

from tests.random_stores import VIT, flat_site, tokens_site
from vitsee_stores import SiteError, SiteSpec
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
    tokens_site(f"stages.{s}.blocks.{b}.out", VIT) for s, n in ((0, 2), (1, 3)) for b in range(n)
]


def names(*patterns: str, sites: list[SiteSpec] = SITES) -> list[str]:
    return [site.name for site in select_names(patterns, sites)]


def test_names_globs_and_order() -> None:
    assert names("norm", "embed") == ["embed", "norm"]
    assert names("blocks.1*.out") == ["blocks.1.out", "blocks.10.out"]
    assert names("blocks.[23].norm?") == ["blocks.2.norm1", "blocks.3.norm1"]
    assert names("blocks.3.out", "blocks.3.*") == ["blocks.3.in", "blocks.3.norm1", "blocks.3.out"]


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


@pytest.mark.parametrize(
    "pattern", ["blokcs.*", "BLOCKS.0.out", "blocks.-12.out", "blocks.11.out", "hidden", "", "-1"]
)
def test_nothing_matches(pattern: str) -> None:
    with pytest.raises(SiteError) as error:
        names("embed", pattern)
    said = str(error.value)
    assert said.startswith(f"no site matches {pattern!r}; sites of this model: embed, blocks.0.in,")
    assert said.endswith("... (36 in all) (run: vitsee sites MODEL)")

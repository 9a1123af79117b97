"""`MODEL?OPTION=VALUE` in Python and in vitsee weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vitsee
from tests.tables import unique
from vitsee_cli.main import main
from vitsee_core.extraction.options import OptionError, options_in_name
from vitsee_core.tables.results import Table


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("demo:vit", "demo:vit", {}),
        ("vit?random-init=3", "vit", {"random_init": 3}),
        ("vit?img-size=64", "vit", {"img_size": (64, 64)}),
        ("vit?img-size=64x96&crop-pct=1", "vit", {"img_size": (64, 96), "crop_pct": 1.0}),
        ("vit?checkpoint=a/x.pth", "vit", {"checkpoint": Path("a/x.pth")}),
        ("vit?img-mean=0.1,0.2,0.3", "vit", {"img_mean": (0.1, 0.2, 0.3)}),
        (
            "vit?model-arg=depth=2&model-arg=pool=avg",
            "vit",
            {"model_args": {"depth": 2, "pool": "avg"}},
        ),
        ("vit?ablate-skip=blocks.1.attn", "vit", {"ablate_skip": ("blocks.1.attn",)}),
    ],
)
def test_options_in_a_name(text: str, name: str, options: dict[str, Any]) -> None:
    assert options_in_name(text) == (name, options)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("vit?seed=3", "no option 'seed' of a model; expected checkpoint"),
        ("vit?random-init=x", "random-init is 'x'"),
        ("vit?img-size=0", "img-size is '0'"),
        ("vit?random-init=1&random-init=2", "takes one value"),
        ("vit?model-arg=depth", "model-arg is 'depth'"),
    ],
)
def test_what_is_refused(text: str, phrase: str) -> None:
    with pytest.raises(OptionError, match=phrase.replace("?", r"\?")):
        options_in_name(text)


@pytest.mark.slow
def test_extract_in_python(tmp_path: Path) -> None:
    named = vitsee.extract(
        "demo:vit?random-init=5",
        "demo:test",
        tmp_path / "a.zarr",
        images=2,
        sites="embed",
    )
    assert named.manifest.model["name"] == "demo:vit"
    assert named.manifest.model["weights"]["seed"] == 5
    own = vitsee.extract(
        "demo:vit?random-init=5", "demo:test", tmp_path / "b.zarr", images=2, sites="embed",
        random_init=6,
    )  # fmt: skip
    assert own.manifest.model["weights"]["seed"] == 6


def test_weights_of_one_model_twice(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    words = [
        "weights",
        "demo:vit",
        "demo:vit?random-init=0",
        "--what",
        "components",
        "-o",
        path,
    ]
    found = CliRunner().invoke(main, [*map(str, words)])
    assert found.exit_code == 0, found.stderr
    table = Table.read(path)
    assert len(unique(table, "store")) == 2 and unique(table, "model") == ["demo:vit"]
    assert any("random 0" in store for store in unique(table, "store"))

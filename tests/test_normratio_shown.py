"""What a user of `vitsee normratio` sees: figures, files, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.extractions import RESNET, extracted, plant_images
from tests.printed_text import colour_bars
from tests.residuals import SITES, cnn, products_of, random_branches, vit
from tests.stores import write_residuals
from vitsee_cli.main import main
from vitsee_core.analyses.normratio import plot, run
from vitsee_core.tables.results import Table
from vitsee_stores.layout import TokenLayout

# ---------------------------------------------------------------- figure


def after_csv(table: Table, folder: Path) -> Table:
    """The table as a CSV brings it back."""
    table.write(folder / "r.csv")
    return Table.read(folder / "r.csv")


@pytest.mark.slow
def test_curves_of_several_stores(tmp_path: Path) -> None:
    table = run(
        vit(tmp_path / "vit.zarr"),
        cnn(tmp_path / "resnet.zarr"),
        tokens=["cls", "patches"],
    )
    figure = plot(after_csv(table, tmp_path))
    # Three means of a ratio look alike: one stands for them.
    assert len(figure.axes) == 3
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == [
        *("vit class token, attention", "vit patches, attention"),
        *(
            "vit class token, MLP",
            "vit patches, MLP",
            "resnet patches, block",
            "skip = branch",
        ),
    ]
    rows = table.filter(store="vit", token="cls", metric="norm_ratio")
    rows = rows.filter(pl.col("site").is_in([SITES[0], SITES[2]]))
    line = figure.axes[0].lines[0]
    assert np.array_equal(np.asarray(line.get_xdata()), rows["rel_depth"])
    assert np.array_equal(np.asarray(line.get_ydata()), rows["value"])


@pytest.mark.slow
def test_no_two_curves_look_alike(tmp_path: Path) -> None:
    """As many stores as one panel takes, with all their tokens and sublayers."""
    stores = [vit(tmp_path / f"s{i}.zarr") for i in range(6)]
    lines = plot(run(*stores, tokens=["cls", "patches"])).axes[0].lines[:-1]
    looks = {
        (line.get_color(), line.get_marker(), str(line.get_linestyle()), line.get_label())
        for line in lines
    }
    assert len(lines) == 6 * 2 * 2
    assert len({look[:3] for look in looks}) == len(looks) == len(lines)


def test_no_two_curves_of_many_stores_look_alike(tmp_path: Path) -> None:
    """Sixteen: more than there are colours; a panel for each kind of token and sublayer."""
    table = run(vit(tmp_path / "s.zarr"), tokens=["cls", "patches"])
    names = [f"s{i}" for i in range(16)]
    copies = [table.frame.with_columns(store=pl.lit(name)) for name in names]
    figure = plot(Table.concat(copies))
    assert len(figure.axes) == 4
    for axes in figure.axes:
        lines = [line for line in axes.lines if str(line.get_label()) in names]
        assert (
            len({(line.get_color(), line.get_marker()) for line in lines})
            == len(lines)
            == 16
        )


@pytest.mark.slow
def test_maps_of_tokens(tmp_path: Path) -> None:
    layout = TokenLayout(("cls",), (3, 3), stride_px=(8.0, 8.0))
    store = vit(tmp_path / "a.zarr", tokens=10, layout=layout)
    table = run(store, metrics=["norm_ratio", "cos_branch"])
    figure = plot(after_csv(table, tmp_path))
    # Attention and MLP of both metrics, and their curves.
    assert len(figure.axes) == 2 * 2 + 2 and len(colour_bars(figure)) == 2
    attention = figure.axes[0]
    assert attention.get_title(loc="left") == "a, attention (n = 10)"
    assert [t.get_text() for t in attention.get_yticklabels()] == ["CLS", "0", "1", "2"]
    rows = table.filter(pl.col("site").is_in([SITES[0], SITES[2]]), metric="norm_ratio")
    cls, *columns = [np.asarray(image.get_array()) for image in attention.images]
    assert np.array_equal(cls[0], rows["value"][[0, 10]])
    assert np.array_equal(
        np.concatenate(columns, 1), rows["value"].reshape(2, 10)[:, 1:].T
    )
    spatial = next(
        x for x in figure.axes[4].lines if x.get_label() == "patches, attention"
    )
    expected = run(store, tokens=["patches"], metrics=["norm_ratio"], sites=["attn"])[
        "value"
    ]
    assert np.asarray(spatial.get_ydata()) == pytest.approx(expected, rel=1e-14)


@pytest.mark.slow
def test_a_scale_for_large_spans(tmp_path: Path) -> None:
    z, f = random_branches(10, 7)
    z *= np.array([1, 1, 1, 1, 1, 1, 100])[:, None]
    figure = plot(
        run(write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products_of(z, f)}))
    )
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] + ["linear"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens", [["each"], ["0,0", "1,1"], ["prefix"], ["all", "each"]]
)
def test_what_else_a_table_may_hold(tmp_path: Path, tokens: list[str]) -> None:
    layout = TokenLayout(("dist", "cls", "reg0"), (3, 3), stride_px=(8.0, 8.0))
    store = vit(tmp_path / "a.zarr", tokens=12, layout=layout)
    plot(
        after_csv(run(store, tokens=tokens, metrics=["norm_ratio", "cos_out"]), tmp_path)
    )
    both = [*tokens, "patches"]
    plot(run(store, cnn(tmp_path / "r.zarr"), tokens=both, metrics=["cos_branch"]))


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_a_freshly_initialised_resnet(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 6)
    path = tmp_path / "fresh.zarr"
    extracted(*RESNET, "--data", images, "--tokens", "pooled", "-o", path)
    args = ["normratio", str(path), "--metric", "norm_ratio", "--tokens"]
    assert CliRunner().invoke(main, [*args, "mean"]).exit_code == 2
    result = CliRunner().invoke(main, [*args, "patches"])
    assert result.exit_code == 0
    assert "fresh: the branch is 0 in every image and token of layer1.0" in result.stderr
    rows = result.stdout.splitlines()[1:]
    assert rows and all(",,,,0" in row for row in rows)


def test_the_legend_shows_dashes_beside_the_marker(tmp_path: Path) -> None:
    """Attention and MLP of one token differ by them alone."""
    figure = plot(run(vit(tmp_path / "vit.zarr"), tokens=["cls", "patches"]))
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    dashed = legend.get_lines()[texts.index("class token, MLP")]
    assert dashed.get_linestyle() == "--"
    on, off = (
        3.7 * dashed.get_linewidth(),
        1.6 * dashed.get_linewidth(),
    )  # matplotlib's pattern
    assert texts[-1] == "z: skip connection; f(z): the branch that a sublayer adds to it"
    length = float(np.ptp(dashed.get_xdata()))
    assert (length - dashed.get_markersize()) / 2 >= on + off

"""What a user of `vitsee normratio` sees: figures, files, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.extractions import RESNET, extracted, plant_images
from tests.printed_text import colour_bars
from tests.residuals import SITES, cnn, products_of, random_branches, vit
from tests.stores import write_residuals
from vitsee_cli.main import main
from vitsee_core.analyses.normratio import COLUMNS, plot, run
from vitsee_core.tables.results import Table
from vitsee_stores.layout import TokenLayout

# ---------------------------------------------------------------- figure


def after_csv(table: Table) -> Table:
    """The table as a CSV brings it back: empty cells are empty texts, places are texts."""
    text = {name: np.array(["" if v is None else str(v) for v in table[name]], object)
            for name in ("token", "row", "col")}  # fmt: skip
    return Table(table.columns | text)


def test_curves_of_several_stores(tmp_path: Path) -> None:
    table = run(
        vit(tmp_path / "vit.zarr"), cnn(tmp_path / "resnet.zarr"), tokens=["cls", "patches"]
    )
    figure = plot(after_csv(table))
    # Three means of a ratio look alike: one stands for them.
    assert len(figure.axes) == 3
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == [
        *("vit class token, attention", "vit patches, attention"),
        *("vit class token, MLP", "vit patches, MLP", "resnet patches, block", "skip = branch"),
    ]
    rows = table.where(store="vit", token="cls", metric="norm_ratio")
    rows = rows.where(site=[SITES[0], SITES[2]])
    line = figure.axes[0].lines[0]
    assert np.array_equal(np.asarray(line.get_xdata()), rows["rel_depth"])
    assert np.array_equal(np.asarray(line.get_ydata()), rows["value"])


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
    copies = [Table(table.columns | {"store": np.full(len(table), name)}) for name in names]
    figure = plot(Table.concat(copies))
    assert len(figure.axes) == 4
    for axes in figure.axes:
        lines = [line for line in axes.lines if str(line.get_label()) in names]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines) == 16


def test_maps_of_tokens(tmp_path: Path) -> None:
    layout = TokenLayout(("cls",), (3, 3), stride_px=(8.0, 8.0))
    store = vit(tmp_path / "a.zarr", tokens=10, layout=layout)
    table = run(store, metrics=["norm_ratio", "cos_branch"])
    figure = plot(after_csv(table))
    # Attention and MLP of both metrics, and their curves.
    assert len(figure.axes) == 2 * 2 + 2 and len(colour_bars(figure)) == 2
    attention = figure.axes[0]
    assert attention.get_title(loc="left") == "a, attention (n = 10)"
    assert [t.get_text() for t in attention.get_yticklabels()] == ["CLS", "0", "1", "2"]
    rows = table.where(metric="norm_ratio", site=[SITES[0], SITES[2]])
    cls, *columns = [np.asarray(image.get_array()) for image in attention.images]
    assert np.array_equal(cls[0], rows["value"][[0, 10]])
    assert np.array_equal(np.concatenate(columns, 1), rows["value"].reshape(2, 10)[:, 1:].T)
    spatial = next(x for x in figure.axes[4].lines if x.get_label() == "patches, attention")
    expected = run(store, tokens=["patches"], metrics=["norm_ratio"], sites=["attn"])["value"]
    assert np.asarray(spatial.get_ydata()) == pytest.approx(expected, rel=1e-14)


def test_a_scale_for_large_spans(tmp_path: Path) -> None:
    z, f = random_branches(10, 7)
    z *= np.array([1, 1, 1, 1, 1, 1, 100])[:, None]
    figure = plot(run(write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products_of(z, f)})))
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] + ["linear"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [["each"], ["0,0", "1,1"], ["prefix"], ["all", "each"]])
def test_what_else_a_table_may_hold(tmp_path: Path, tokens: list[str]) -> None:
    layout = TokenLayout(("dist", "cls", "reg0"), (3, 3), stride_px=(8.0, 8.0))
    store = vit(tmp_path / "a.zarr", tokens=12, layout=layout)
    plot(after_csv(run(store, tokens=tokens, metrics=["norm_ratio", "cos_out"])))
    both = [*tokens, "patches"]
    plot(run(store, cnn(tmp_path / "r.zarr"), tokens=both, metrics=["cos_branch"]))


# ---------------------------------------------------------------- the command


def normratio_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["normratio", *map(str, args)])


def test_command_prints_the_table(tmp_path: Path) -> None:
    store = vit(tmp_path / "a.zarr")
    result = normratio_command(f"mine={store.path}")
    assert result.exit_code == 0
    text = io.StringIO()
    run(store).to_csv(text)
    assert result.stdout == text.getvalue().replace("\na,", "\nmine,")
    header, first, second = result.stdout.splitlines()[:3]
    assert header == ",".join(COLUMNS)
    assert first.startswith("mine,tiny,,blocks.0.attn,blocks.0,0,0.0,cls,,,norm_ratio,")
    assert second.startswith("mine,tiny,,blocks.0.attn,blocks.0,0,0.0,,0,0,norm_ratio,")


def test_command_writes_files(tmp_path: Path) -> None:
    path = vit(tmp_path / "a.zarr").path
    csv, png = tmp_path / "r.csv", tmp_path / "r.png"
    args = ["--metric", "norm_ratio", "--images", "4", "--tokens", "cls", "--tokens", "patches"]
    result = normratio_command(path, "-o", csv, "--png", png, *args)
    assert (result.exit_code, result.stdout) == (0, "")
    assert len(csv.read_text().splitlines()) == 1 + 8
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["tokens"] == ["cls", "patches"]
    assert sidecar["notes"]["images"]["a"]["rows"] == 4
    assert "t(0.975" in sidecar["notes"]["interval"]["norm_ratio"]
    assert png.read_bytes()[1:4] == b"PNG"


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    path = vit(tmp_path / "a.zarr").path
    plain = write_residuals(tmp_path / "p.zarr", {}, n_images=3).path
    locations = cnn(tmp_path / "r.zarr").path
    (tmp_path / "r.csv").write_text("mine")
    for args, phrase in (
        ((path, "-o", tmp_path / "r.csv"), "--force"),
        ((plain,), "--residual"),
        ((tmp_path / "missing.zarr",), "missing.zarr"),
        ((path, "--sites", "blocks.9.mlp"), "no site matches 'blocks.9.mlp'"),
        ((locations, "--tokens", "cls"), "r has no tokens 'cls'"),
        ((path, "--tokens", "7,7"), "a has no tokens '7,7'"),
    ):
        result = normratio_command(*args)
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert phrase in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "r.csv").read_text() == "mine"
    for usage in (("--metric", "ratio"), ("--tokens", "mean")):
        assert normratio_command(path, *usage).exit_code == 2


def test_a_freshly_initialised_resnet(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 6)
    path = tmp_path / "fresh.zarr"
    extracted(*RESNET, "--data", images, "--tokens", "pooled", "-o", path)
    result = normratio_command(path, "--metric", "norm_ratio", "--tokens", "patches")
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
    on, off = 3.7 * dashed.get_linewidth(), 1.6 * dashed.get_linewidth()  # matplotlib's pattern
    assert texts[-1] == "z: skip connection; f(z): the branch that a sublayer adds to it"
    length = float(np.ptp(dashed.get_xdata()))
    assert (length - dashed.get_markersize()) / 2 >= on + off

"""`extract --short-side --tiles` (Walmer et al. 2023, Sec. B.4) against loops over tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import vitsee
from tests.extractions import array_bytes, extract, extracted
from tests.image_files import plant
from vitsee_core.extraction.tiles import n_tiles, starts, tiles_of
from vitsee_core.images import normalise
from vitsee_core.images.placement import place
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import Pictures, model_of
from vitsee_stores import open_store, validate
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.plan import Canvas, corner_size

Array = NDArray[Any]
VIT = [
    "test_vit",
    "--random-init",
    "0",
    "--img-size",
    "32",
    "--model-arg",
    "patch_size=8",
]


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Smooth pictures of these heights and widths: 0.png, 1.png, ..."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i, (height, width) in enumerate(sizes):
        seed = Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8))
        seed.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return folder


def first_writer(size: tuple[int, int], side: tuple[int, int]) -> Array:
    """(height, width) the number of the tile that each pixel is of: tile after tile, each taking
    what none had before."""
    owner = np.full(size, -1)
    number = 0
    for top in range(0, size[0], side[0]):
        for left in range(0, size[1], side[1]):
            y, x = min(top, size[0] - side[0]), min(left, size[1] - side[1])
            part = owner[y : y + side[0], x : x + side[1]]
            part[part < 0] = number
            number += 1
    return owner


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_every_pixel_comes_from_the_first_tile(
    high: int, wide: int, more_rows: int, more_cols: int
) -> None:
    size = high + more_rows, wide + more_cols
    owner = np.full(size, -1)
    number = 0
    for top, row in starts(size[0], high):
        for left, col in starts(size[1], wide):
            new = owner[top + row : top + high, left + col : left + wide]
            assert (new == -1).all() and new.size
            new[...] = number
            number += 1
    np.testing.assert_array_equal(owner, first_writer(size, (high, wide)))
    assert number == n_tiles(size, (high, wide))


@pytest.mark.parametrize(
    ("size", "n"),
    [((480, 854), 8), ((480, 910), 8), ((854, 480), 8), ((448, 448), 4), ((480, 1152), 10),
     ((480, 640), 6)],
)  # fmt: skip
def test_numbers_of_tiles_as_published(size: tuple[int, int], n: int) -> None:
    canvas = Canvas((1072, 1072), 448, 16, (224, 224))
    assert len(tiles_of([(0, 0), size], canvas)) == n
    assert {tile.image for tile in tiles_of([(0, 0), size], canvas)} == {1}


class Colours(nn.Module):
    """A block that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(3)[:, :, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(x)
        return found


class PatchMeans(nn.Module):
    """A model whose tokens are the mean colours of their patches: nothing is mixed."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 3, patch, patch, bias=False)
        self.blocks = nn.Sequential(Colours(), Colours())
        with torch.no_grad():
            means = torch.eye(3)[:, :, None, None] / patch**2
            self.embed.weight.copy_(means.expand(3, 3, patch, patch))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(self.embed(x)).mean((2, 3))
        return found


SIZES = [(480, 854), (480, 910), (854, 480), (448, 448)]


@pytest.mark.slow
def test_a_model_that_mixes_nothing_sees_the_resized_image(tmp_path: Path) -> None:
    data = pictures(tmp_path / "d", SIZES)
    config = {
        "input_size": (3, 224, 224), "interpolation": "bicubic", "mean": (0.0,) * 3,
        "std": (1.0,) * 3,
    }  # fmt: skip
    store = vitsee.extract(
        PatchMeans(16), data, tmp_path / "s.zarr", transform=config, name="means",
        short_side=448, tiles=True, dtype="float32", inputs=True, batch_size=5,
    )  # fmt: skip
    assert store.plan.canvas == Canvas((784, 848), 448, 16, (224, 224))
    for row, name in enumerate(store.samples.id):
        size = SIZES[int(name.removesuffix(".png"))]
        assert tuple(store.sizes[row]) == size
        height, width = corner_size(size, 448, 16)
        image = Image.open(data / name).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image, np.float64) / 255
        means = pixels.reshape(height // 16, 16, width // 16, 16, 3).mean((1, 3))
        grid = store.acts("blocks.0.out", "patches", partial=True)[row]
        rows, cols = means.shape[:2]
        # single precision
        np.testing.assert_allclose(grid[:rows, :cols], means, atol=1e-5)
        assert not grid[rows:].any() and not grid[:, cols:].any()
        layout = store.layout("blocks.0.out")
        assert layout is not None and layout.grid == (49, 53)
        on = place(store.manifest.transform, size).on_image(layout)
        assert on[:rows, :cols].all() and on.sum() == rows * cols
        np.testing.assert_allclose(
            store.pooled("blocks.0.out")[row], means.mean((0, 1)), atol=1e-5
        )
        seen = store.array("input")[row]
        np.testing.assert_array_equal(
            seen[:, :height, :width], np.asarray(image).transpose(2, 0, 1)
        )
        assert not seen[:, height:].any() and not seen[:, :, width:].any()


SMALL = [(48, 85), (91, 48), (44, 44), (48, 60), (60, 40)]


def whole_grids(store: Any, data: Path, site: str) -> list[Array]:
    """(rows, cols, dim) of each image, with the store's own model on one tile after another."""
    model = model_of_tiles(store)
    grids = []
    for name in store.samples.id:
        image = Image.open(data / name).convert("RGB")
        height, width = corner_size((image.height, image.width), 48, 8)
        pixels = np.asarray(
            image.resize((width, height), Image.Resampling.BICUBIC), np.float32
        )
        x = torch.from_numpy((pixels.transpose(2, 0, 1) / 255 - 0.5) / 0.5)
        owner = first_writer((height, width), (32, 32))
        grid = np.zeros((height // 8, width // 8, 64), np.float32)
        number = 0
        for top in range(0, height, 32):
            for left in range(0, width, 32):
                y, z = min(top, height - 32), min(left, width - 32)
                tokens = run_to(model, site, x[None, :, y : y + 32, z : z + 32])
                for r in range(4):
                    for c in range(4):
                        if owner[y + 8 * r, z + 8 * c] == number:
                            grid[y // 8 + r, z // 8 + c] = tokens[1 + 4 * r + c]
                number += 1
        grids.append(grid)
    return grids


def model_of_tiles(store: Any) -> nn.Module:
    loaded = load_model(
        "test_vit", random_init=0, img_size=32, model_args={"patch_size": 8}
    )
    assert loaded.weights["sha256"] == store.manifest.identity["weights"]
    return loaded.module


def run_to(model: nn.Module, site: str, x: torch.Tensor) -> Array:
    """(tokens, dim) of one tile after a block."""
    kept: list[torch.Tensor] = []
    hook = model.get_submodule(site.removesuffix(".out")).register_forward_hook(
        lambda _m, _a, out: kept.append(out[0].detach().clone())
    )
    with torch.inference_mode():
        model(x)
    hook.remove()
    return kept[0].numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of five sizes below `d`, and their store in three slabs."""
    folder = tmp_path_factory.mktemp("tiles")
    pictures(folder / "d", SMALL)
    extracted(*command(folder / "d", folder / "s.zarr"))
    return folder


def command(data: Path, path: Path, *more: Any) -> list[Any]:
    return [*VIT, "--data", data, "--short-side", 48, "--tiles", "--slab", 2, "--dtype", "float32",
            "-o", path, *more]  # fmt: skip


def test_tiles_see_only_themselves(made: Path) -> None:
    store = open_store(made / "s.zarr")
    assert store.plan.canvas == Canvas((88, 80), 48, 8, (32, 32))
    for site in ("blocks.0.out", "blocks.5.out"):
        grids = store.acts(site, "patches", partial=True)[:]
        for row, expected in enumerate(whole_grids(store, made / "d", site)):
            rows, cols = expected.shape[:2]
            # other batches of the same products
            np.testing.assert_allclose(
                grids[row, :rows, :cols], expected, rtol=1e-4, atol=1e-5
            )
            assert not grids[row, rows:].any() and not grids[row, :, cols:].any()
            np.testing.assert_allclose(
                store.pooled(site)[row], expected.mean((0, 1)), rtol=1e-4, atol=1e-5
            )
    assert validate(made / "s.zarr", deep=True) == []


def test_what_is_kept_of_tiles(made: Path) -> None:
    store = open_store(made / "s.zarr")
    assert {s.kind for s in store.sites.values()} == {"tokens"} and "norm" in store.sites
    assert all(s.layout is not None and not s.layout.prefix for s in store.sites.values())
    assert not store.plan.attention and not store.plan.sublayers
    left_out = store.manifest.left_out
    assert {
        "attention",
        "residual",
        "pooled",
        "logits",
        "prefix tokens",
    } <= left_out.keys()
    assert "do not see each other" in left_out["prefix tokens"]
    assert store.manifest.model["input_size"] == [3, 32, 32]
    with pytest.raises(
        MissingInput, match="made of tiles of 32 x 32 pixels, and nothing is recom"
    ):
        model_of(store)
    pixels = Pictures(store)(np.arange(5))
    assert pixels.shape == (5, 3, 88, 80)


@pytest.mark.slow
def test_the_same_bytes_again_in_shards_and_after_a_stop(
    made: Path, tmp_path: Path
) -> None:
    whole = array_bytes(made / "s.zarr")
    data = made / "d"
    for shard in (1, 0):
        extracted(*command(data, tmp_path / "a.zarr", "--shard", f"{shard}/2"))
    assert array_bytes(tmp_path / "a.zarr") == whole
    extracted(*command(data, tmp_path / "b.zarr", "--workers", 1))
    assert array_bytes(tmp_path / "b.zarr") == whole
    for marker in (tmp_path / "b.zarr" / "commits").glob("c.1.*"):
        marker.unlink()
    for part in ("acts", "pooled"):
        for chunk in (tmp_path / "b.zarr" / part).rglob("c.1.*"):
            chunk.unlink()
    again = extracted(*command(data, tmp_path / "b.zarr"))
    assert "reading the sizes" not in again.stderr  # the canvas is the store's
    assert array_bytes(tmp_path / "b.zarr") == whole


@pytest.mark.slow
def test_batches_of_few_tiles_change_last_digits_only(made: Path, tmp_path: Path) -> None:
    """Parts of an image's tiles at a time, and several images at once."""
    store = open_store(made / "s.zarr")
    for size in (2, 64):
        path = tmp_path / f"{size}.zarr"
        extracted(*command(made / "d", path, "--batch-size", size))
        other = open_store(path)
        for site in ("embed", "blocks.5.out", "norm"):
            a, b = (s.acts(site, "patches", partial=True)[:] for s in (store, other))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                store.pooled(site)[:], other.pooled(site)[:], rtol=1e-4, atol=1e-5
            )


@pytest.mark.slow
def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    """One in a slab, and a whole slab of them."""
    data = pictures(tmp_path / "d", SMALL)
    for name in ("5", "6", "7", "8"):
        (data / f"{name}.png").write_bytes(b"no image")
    extracted(*command(data, tmp_path / "s.zarr", "--order", "dataset", "--inputs"))
    store = open_store(tmp_path / "s.zarr")
    assert store.valid.tolist() == [True] * 5 + [False] * 4
    assert np.isnan(store.acts("norm", "patches", partial=True)[5:]).all()
    assert np.isnan(store.pooled("norm")[5:]).all()
    assert np.isfinite(store.pooled("norm")[:5]).all()
    assert validate(tmp_path / "s.zarr", deep=True) == []
    bad = plant(tmp_path / "bad", "a.png")
    (bad / "a.png").write_bytes(b"")
    result = extract(*command(bad, tmp_path / "b.zarr"))
    assert result.exit_code == 1 and "no image of" in result.stderr


def test_a_strip_does_not_decide_the_canvas(tmp_path: Path) -> None:
    """1 by 1,000,000 pixels would become 48 by 48,000,000: an image that cannot be read."""
    data = pictures(tmp_path / "d", SMALL[:2])
    Image.new("L", (1_000_000, 1)).save(data / "strip.png")
    result = extracted(*command(data, tmp_path / "s.zarr", "--tokens", "pooled"))
    assert "strip.png (cannot be resized" in result.stderr
    store = open_store(tmp_path / "s.zarr")
    assert store.valid.sum() == 2 and store.plan.canvas == Canvas(
        (88, 80), 48, 8, (32, 32)
    )


@pytest.mark.slow
def test_pooled_only_and_half_precision(made: Path, tmp_path: Path) -> None:
    store = open_store(made / "s.zarr")
    extracted(*command(made / "d", tmp_path / "p.zarr", "--tokens", "pooled"))
    pooled = open_store(tmp_path / "p.zarr")
    for site in ("embed", "blocks.3.out"):
        np.testing.assert_array_equal(pooled.pooled(site)[:], store.pooled(site)[:])
    half = [
        w if w != "float32" else "float16"
        for w in command(made / "d", tmp_path / "h.zarr")
    ]
    extracted(*half)
    stored = open_store(tmp_path / "h.zarr").acts("norm", "patches", partial=True)[:]
    exact = store.acts("norm", "patches", partial=True)[:]
    np.testing.assert_array_equal(stored, exact.astype(np.float16))


def test_stages_of_a_cnn(tmp_path: Path) -> None:
    """Grids of several steps; the multiple is that of the coarsest."""
    data = pictures(tmp_path / "d", [(70, 130), (64, 64)])
    extracted(
        "test_resnet", "--random-init", 0, "--img-size", 64, "--data", data, "--short-side", 64,
        "--tiles", "-o", tmp_path / "s.zarr", "--dtype", "float32",
    )  # fmt: skip
    store = open_store(tmp_path / "s.zarr")
    assert store.plan.canvas is not None and store.plan.canvas.multiple == 32
    assert store.plan.canvas.size == (64, 96)  # 64 * 130 / 70 = 118.9
    row = store.samples.id.tolist().index("0.png")
    inputs = Pictures(store)(np.array([row]))
    model = load_model("test_resnet", random_init=0, img_size=64)
    x = normalise(torch.from_numpy(inputs), store.manifest.transform, "cpu")
    name = [n for n in store.sites if n.endswith(".out")][-1]
    last = store.sites[name].layout
    assert last is not None and last.grid == (2, 3)
    with torch.inference_mode():
        left = model.module.forward_features(x[..., :64])[0]  # type: ignore[operator]
        right = model.module.forward_features(x[..., 32:])[0]  # type: ignore[operator]
    expected = torch.cat([left, right[..., 1:]], -1).permute(1, 2, 0).numpy()
    found = store.acts(name, "patches", partial=True)[row]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- without tiles


@pytest.mark.slow
def test_without_tiles_the_model_sees_whole_images(tmp_path: Path) -> None:
    """Equal to what the same size by --img-size gives, attention and all."""
    data = pictures(tmp_path / "d", [(50, 84), (100, 168), (50, 83)])
    model = [
        "test_vit",
        "--random-init",
        0,
        "--model-arg",
        "patch_size=8",
        "--data",
        data,
    ]
    extracted(*model, "--short-side", 32, "-o", tmp_path / "a.zarr")
    size = ["--img-size", "32x48", "--crop-mode", "squash", "--crop-pct", 1]
    extracted(*model, *size, "-o", tmp_path / "b.zarr")
    assert array_bytes(tmp_path / "a.zarr") == array_bytes(tmp_path / "b.zarr")
    store = open_store(tmp_path / "a.zarr")
    assert store.plan.canvas == Canvas((32, 48), 32, 8) and store.fills.all()
    assert store.plan.attention and "logits" in store.sites
    assert store.acts("blocks.0.out")[:].shape == (3, 25, 64)
    assert model_of(store).input_size == (3, 32, 48)
    assert (
        "is complete"
        in extracted(*model, "--short-side", 32, "-o", tmp_path / "a.zarr").stderr
    )
    other = extract(*model, *size, "-o", tmp_path / "a.zarr")
    assert (
        other.exit_code == 1
        and "transform.crop_mode is corner, given squash" in other.stderr
    )


@pytest.mark.parametrize(
    ("options", "code", "phrase"),
    [
        (["--tiles"], 2, "--tiles is about images on a canvas: give --short-side N too"),
        (["--multiple", 8], 2, "--multiple is about images on a canvas"),
        (
            ["--short-side", 48, "--tiles", "--crop-mode", "center"],
            2,
            "--crop-mode and --short-",
        ),
        (
            ["--short-side", 48, "--tiles", "--crop-pct", 1],
            2,
            "--crop-pct and --short-side excl",
        ),
        (
            ["--short-side", 48, "--tiles", "--fill", "black"],
            2,
            "--fill and --short-side exclude",
        ),
        (
            ["--short-side", 48],
            2,
            "--img-size and --short-side exclude each other, but with",
        ),
        (
            ["--short-side", 50, "--tiles"],
            1,
            "--short-side is 50, no multiple of the 8 pixels b",
        ),
        (
            ["--short-side", 48, "--tiles", "--multiple", 12],
            1,
            "--multiple is 12, no multiple of",
        ),
        (
            ["--short-side", 48, "--tiles", "--multiple", 64],
            1,
            "expected at most --short-side, 48",
        ),
        (
            ["--short-side", 24, "--tiles"],
            1,
            "gives sides of 24 pixels and more, a tile has 32",
        ),
        (["--short-side", 48, "--tiles", "--multiple", 40], 0, "canvas of"),
        (
            ["--short-side", 48, "--tiles", "--erf", 4],
            1,
            "--erf is not supported with --tiles",
        ),
        (
            ["--short-side", 48, "--tiles", "--grams"],
            1,
            "--grams is not supported with --tiles",
        ),
        (
            ["--short-side", 48, "--tiles", "--attention", "rows"],
            1,
            "--attention rows is not sup",
        ),
        (
            ["--short-side", 48, "--tiles", "--residual"],
            1,
            "--residual True is not supported",
        ),
        (
            ["--short-side", 48, "--tiles", "--sites", "logits"],
            1,
            "--tiles keeps sites with a gr",
        ),
    ],
)
def test_refusals(
    options: list[Any], code: int, phrase: str, made: Path, tmp_path: Path
) -> None:
    result = extract(
        *VIT, "--data", made / "d", "-o", tmp_path / "r.zarr", "--dry-run", *options
    )
    assert result.exit_code == code, result.stderr
    assert phrase in result.stderr
    assert not (tmp_path / "r.zarr").exists() and (code == 0 or result.stdout == "")


def test_more_refusals(made: Path, tmp_path: Path) -> None:
    plain = ["--data", made / "d", "-o", tmp_path / "r.zarr"]
    vit = ["test_vit", "--random-init", 0, "--model-arg", "patch_size=8", *plain]
    unlike = extract(*vit, "--short-side", 48)
    assert unlike.exit_code == 1
    assert "--short-side 48 brings the images to 5 sizes: " in unlike.stderr
    assert "give --tiles, or bring all to one with --img-size" in unlike.stderr
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.ReLU())
    config = {"input_size": (3, 32, 32), "mean": (0.5,), "std": (0.5,)}
    with pytest.raises(
        VitseeError, match="has no grid of whole patches over its input of 32 x 32"
    ):
        vitsee.extract(
            flat,
            made / "d",
            tmp_path / "f.zarr",
            transform=config,
            short_side=48,
            tiles=True,
        )
    with pytest.raises(
        VitseeError, match="short_side without tiles loads the model for another"
    ):
        vitsee.extract(
            PatchMeans(8),
            made / "d",
            tmp_path / "f.zarr",
            transform=config,
            short_side=48,
        )
    other = extract(
        *command(made / "d", made / "s.zarr")[:-2],
        "-o",
        made / "s.zarr",
        "--multiple",
        16,
    )
    assert other.exit_code == 1 and "canvas.multiple is 8, given 16" in other.stderr


def test_a_canvas_that_is_mostly_empty_is_said(tmp_path: Path) -> None:
    data = pictures(tmp_path / "d", [(40, 40)] * 4 + [(40, 400)])
    result = extracted(*command(data, tmp_path / "s.zarr", "--dry-run"))
    assert (
        "of the canvas of 480 x 48 pixels: leave the few large ones out with --only"
        in (result.stderr)
    )
    assert (
        "canvas of 480 x 48 pixels, up to 30 tiles of 32 x 32 an image" in result.stderr
    )

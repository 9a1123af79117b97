"""Pixels and normalisation equal timm's own evaluation pipeline, bit for bit."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.transforms_factory import create_transform

from vitsee_core.images import DataError, ImageError, normalise
from vitsee_core.images.decoding import decode
from vitsee_core.images.transform import (
    INTERPOLATIONS,
    Recipe,
    make_recipe,
    steps_of_timm,
    to_mode,
    usual_steps,
)

BASE: dict[str, Any] = {
    "input_size": (3, 64, 64), "interpolation": "bicubic", "crop_pct": 0.9,
    "crop_mode": "center", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
}  # fmt: skip
SIZES = [(97, 131), (131, 97), (64, 64), (20, 33), (71, 71), (300, 61)]


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes with noise, so that every resampling filter shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + c) + y / (5 - c) + c) * 90 + 128 for c in range(3)]
    pixels = np.stack(waves, -1) + rng.normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def timms(transform: dict[str, Any], image: Image.Image) -> torch.Tensor:
    """The tensor that timm's own evaluation gives the model."""
    pipeline = create_transform(**transform, is_training=False)
    result = pipeline(image.convert("RGB" if transform["input_size"][0] == 3 else "L"))
    assert isinstance(result, torch.Tensor)
    return result


def ours(transform: dict[str, Any], image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(make_recipe(transform).apply(image).copy())
    return normalise(pixels[None], transform, "cpu")[0]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 0.95])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_equal_to_timm(
    interpolation: str, crop_mode: str, crop_pct: float, size: tuple[int, int]
) -> None:
    transform = BASE | {"input_size": (3, *size), "interpolation": interpolation}
    transform |= {"crop_mode": crop_mode, "crop_pct": crop_pct}
    assert make_recipe(transform).timm_transform is None
    for width, height in SIZES:
        image = photo(width, height)
        assert torch.equal(ours(transform, image), timms(transform, image)), (
            width,
            height,
        )


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    side=st.integers(8, 70),
    crop_pct=st.floats(0.3, 1.2),
    mode=st.sampled_from(["center", "squash", "border"]),
)
def test_equal_to_timm_at_odd_sizes(
    width: int, height: int, side: int, crop_pct: float, mode: str
) -> None:
    transform = BASE | {
        "input_size": (3, side, side),
        "crop_pct": crop_pct,
        "crop_mode": mode,
    }
    image = photo(width, height)
    try:
        expected = timms(transform, image)
    except ValueError:  # an edge would become 0 pixels
        with pytest.raises(ImageError):
            ours(transform, image)
    else:
        assert torch.equal(ours(transform, image), expected)


@settings(max_examples=100, deadline=None)
@given(
    height=st.integers(1, 600),
    width=st.one_of(st.none(), st.integers(1, 600)),
    channels=st.sampled_from([1, 3]),
    crop_pct=st.one_of(st.floats(0.1, 2.0), st.just(1)),
    mode=st.sampled_from(["center", "squash", "border"]),
    interpolation=st.sampled_from(INTERPOLATIONS),
    border=st.sampled_from([None, 0, 3]),
    mean=st.floats(0, 1),
)
def test_the_usual_steps_are_those_of_timm(
    height: int, width: int | None, channels: int, crop_pct: float, border: int | None,
    mode: str, interpolation: str, mean: float,
) -> None:  # fmt: skip
    transform = {
        "input_size": [channels, height, height if width is None else width],
        "crop_pct": crop_pct, "crop_mode": mode, "crop_border_pixels": border,
        "interpolation": interpolation, "mean": [mean] * channels, "std": [0.5] * channels,
    }  # fmt: skip
    assert usual_steps(transform) == steps_of_timm(transform)[0]
    assert steps_of_timm(transform)[1] is None


@pytest.mark.parametrize(
    "unusual",
    [
        {"crop_mode": None},
        {"crop_mode": "else"},
        {"crop_pct": None},
        {"crop_pct": 0},
        {"crop_pct": float("nan")},
        {"crop_pct": "0.9"},
        {"crop_border_pixels": "3"},
        {"interpolation": "random"},
        {"interpolation": "cubic-ish"},
        {"interpolation": None},
        {"crop_mode": "border", "mean": None},
        {"crop_mode": "border", "mean": ["a", "b", "c"]},
    ],
)
def test_of_what_is_unusual_timm_is_asked(unusual: dict[str, Any]) -> None:
    transform = BASE | unusual
    assert usual_steps(transform) is None
    try:
        steps, whole = steps_of_timm(transform)
    except DataError:
        with pytest.raises(DataError, match="timm cannot build"):
            make_recipe(transform)
    else:
        recipe = make_recipe(transform)
        assert recipe.steps == tuple(steps) and repr(recipe.timm_transform) == repr(whole)


def test_every_value_is_normalised_as_timm_does() -> None:
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    image = Image.fromarray(ramp[0].permute(1, 2, 0).contiguous().numpy())
    transform = BASE | {"input_size": (3, 16, 16), "crop_pct": 1.0}
    assert torch.equal(normalise(ramp, transform, "cpu")[0], timms(transform, image))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_normalisation_on_cuda_is_that_of_the_cpu() -> None:
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    here, there = normalise(ramp, BASE, "cpu"), normalise(ramp, BASE, "cuda")
    assert torch.equal(here, there.cpu())


def test_models_of_one_channel() -> None:
    transform = BASE | {"input_size": (1, 32, 32), "mean": (0.5,), "std": (0.25,)}
    for mode in ("center", "border"):
        chosen = transform | {"crop_mode": mode, "crop_pct": 1.0}
        image = photo(50, 40)
        assert torch.equal(ours(chosen, image), timms(chosen, image))
        assert ours(chosen, image).shape == (1, 32, 32)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "1", "YCbCr", "HSV"])
def test_other_modes_go_through_convert(mode: str) -> None:
    image = photo(70, 80).convert(mode)
    assert torch.equal(ours(BASE, image), timms(BASE, image))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = np.array([[0, 128, 257, 300], [32896, 65535, 65406, 1000]], np.uint16)
    expected = np.array([[0, 0, 1, 1], [128, 255, 254, 4]], np.uint8)
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    image, _ = decode("x", file.getvalue())
    np.testing.assert_array_equal(np.asarray(to_mode(image, "L")), expected)
    np.testing.assert_array_equal(np.asarray(to_mode(image, "RGB"))[..., 1], expected)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_thirty_two_bits_are_refused(mode: str) -> None:
    with pytest.raises(ImageError, match="32-bit pixels"):
        to_mode(Image.new(mode, (4, 4), 300), "RGB")


def test_exif_orientation_is_left_alone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    photo(40, 20).save(file, "PNG", exif=exif)
    assert decode("x", file.getvalue())[0].size == (40, 20)


def test_a_thin_strip_does_not_eat_the_memory() -> None:
    with pytest.raises(ImageError, match="1 x 60000 pixels become"):
        make_recipe(BASE | {"input_size": (3, 224, 224)}).apply(
            Image.new("RGB", (1, 60000))
        )


def test_steps_that_are_not_known_run_as_timm_has_them() -> None:
    recipe = make_recipe(BASE)
    steps = create_transform(**BASE, normalize=False)
    whole = Recipe(recipe.shape, (), steps)
    image = photo(90, 70)
    np.testing.assert_array_equal(whole.apply(image), recipe.apply(image))
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_what_is_refused() -> None:
    with pytest.raises(DataError, match="4 channels"):
        make_recipe(BASE | {"input_size": (4, 8, 8)})
    with pytest.raises(DataError, match="mean has 2 values for 3 channels"):
        normalise(
            torch.zeros(1, 3, 2, 2, dtype=torch.uint8), BASE | {"mean": (0.5, 0.5)}, "cpu"
        )


def test_constants_serve_inside_and_outside_inference_mode() -> None:
    """They are kept on the device: first made in inference mode, then used where gradients are."""
    pixels = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    transform = BASE | {"mean": (0.3, 0.2, 0.1), "std": (0.5, 0.6, 0.7)}
    with torch.inference_mode():
        inside = normalise(pixels, transform, "cpu")
    outside = normalise(pixels, transform, "cpu")
    assert torch.equal(inside, outside) and not outside.is_inference()
    want = (pixels[0, 2, 3, 3].item() / 255 - 0.1) / 0.7
    assert outside[0, 2, 3, 3].item() == pytest.approx(want, rel=1e-6)
    other = normalise(pixels, transform | {"std": (0.25,)}, "cpu")
    assert other[0, 2, 3, 3].item() == pytest.approx(want * 0.7 / 0.25, rel=1e-6)

"""Scenes: objects with known masks, from seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitsee_core.demo import data_file
from vitsee_core.demo.scenes import (
    N_CLASSES,
    PER_CLASS,
    THRESHOLD,
    Placed,
    Sprite,
    background,
    class_names,
    compose,
    random_scene,
    sprite,
)
from vitsee_stores.errors import VitseeError

RED = np.array([255, 0, 0], np.uint8)
BLUE = np.array([0, 0, 255], np.uint8)


def block(height: int, width: int, colour: np.ndarray, category: int = 0) -> Sprite:
    return Sprite(
        np.tile(colour, (height, width, 1)), np.ones((height, width), bool), category
    )


def test_occlusion_by_hand() -> None:
    red, blue = block(2, 3, RED, 4), block(2, 2, BLUE, 7)
    scene = compose((3, 5), [Placed(red, 0, 0), Placed(blue, 1, 2)], seed=3)
    assert scene.masks.astype(int).tolist() == [
        [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]],
    ]
    assert (scene.pixels[scene.masks[0]] == RED).all()
    assert (scene.pixels[scene.masks[1]] == BLUE).all()
    free = ~scene.masks.any(0)
    assert np.array_equal(scene.pixels[free], background((3, 5), 3)[free])
    assert scene.classes.tolist() == [4, 7]


def test_beyond_the_frame() -> None:
    red = block(2, 2, RED)
    places = [(-1, -1), (2, 4), (5, 0), (-2, 1), (0, -7)]
    scene = compose((3, 5), [Placed(red, *place) for place in places])
    assert scene.masks.sum((1, 2)).tolist() == [1, 1, 0, 0, 0]
    assert scene.masks[0][0, 0]
    assert scene.masks[1][2, 4]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_against_a_loop_over_pixels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (int(rng.integers(5, 40)), int(rng.integers(5, 40)))
    placed = [
        Placed(
            sprite(
                int(rng.integers(10)), int(rng.integers(400)), int(rng.integers(1, 30))
            ),
            *rng.integers(-20, 40, 2).tolist(),
        )
        for _ in range(3)
    ]
    scene = compose(size, placed, seed)
    expected = background(size, seed).copy()
    masks = np.zeros((3, *size), bool)
    for y in range(size[0]):
        for x in range(size[1]):
            for i in (2, 1, 0):
                one = placed[i]
                row, col = y - one.top, x - one.left
                height, width = one.sprite.mask.shape
                if 0 <= row < height and 0 <= col < width and one.sprite.mask[row, col]:
                    masks[i, y, x] = True
                    expected[y, x] = one.sprite.pixels[row, col]
                    break
    assert np.array_equal(scene.masks, masks)
    assert np.array_equal(scene.pixels, expected)


@pytest.mark.parametrize("size", [1, 2, 7, 28, 60])
@pytest.mark.parametrize("category", [1, 5, 8])
def test_a_sprite_fills_its_box(category: int, size: int) -> None:
    for instance in range(0, 400, 37):
        one = sprite(category, instance, size)
        assert one.mask.shape == one.pixels.shape[:2]
        # the faint rim of a scaled image may fall below the threshold
        assert size - max(1, size // 10) <= max(one.mask.shape) <= size or size < 3
        for side in (one.mask[0], one.mask[-1], one.mask[:, 0], one.mask[:, -1]):
            assert side.any()
        assert not one.pixels[~one.mask].any()
        assert one.pixels[one.mask].max(-1).min() > 60


def test_the_silhouette_is_the_bundled_image() -> None:
    with np.load(data_file()) as file:
        image = file["images"][file["labels"] == 8][5]
    on = image > THRESHOLD
    rows, cols = np.flatnonzero(on.any(1)), np.flatnonzero(on.any(0))
    box = on[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    assert np.array_equal(sprite("Bag", 5, max(box.shape)).mask, box)


def test_a_class_has_a_colour() -> None:
    """Mean colours of objects are nearer to their class's mean than to any other's."""
    colours = np.array(
        [
            [_hue(sprite(c, i, 28)) for i in range(0, PER_CLASS, 40)]
            for c in range(N_CLASSES)
        ]
    )
    centres = colours.mean(1)
    for c in range(N_CLASSES):
        gaps = np.linalg.norm(colours[c][:, None] - centres, axis=-1)
        assert (gaps.argmin(1) == c).all()


def _hue(one: Sprite) -> np.ndarray:
    mean = one.pixels[one.mask].astype(float).mean(0)
    direction: np.ndarray = mean / np.linalg.norm(mean)
    return direction


def test_seeds_decide_everything() -> None:
    first, again, other = (random_scene((48, 80), 4, seed) for seed in (5, 5, 6))
    assert np.array_equal(first.pixels, again.pixels)
    assert np.array_equal(first.masks, again.masks)
    assert not np.array_equal(first.pixels, other.pixels)
    assert first.masks.sum(0).max() <= 1
    assert set(random_scene((48, 80), 9, 1, categories=(2, 3)).classes) <= {2, 3}
    # a background is smooth
    steps = np.abs(np.diff(background((48, 80), 1).astype(int), axis=1))
    assert steps.max() < 20


def test_classes_and_refusals() -> None:
    assert class_names()[8] == "Bag"
    assert sprite("Bag", 3).category == sprite(8, 3).category == 8
    for wrong in ({"category": "Hat"}, {"category": 10}, {"category": -1}):
        with pytest.raises(
            VitseeError, match=r"no class .* its classes: T-shirt/top, Trouser"
        ):
            sprite(**wrong)  # type: ignore[arg-type]
    with pytest.raises(VitseeError, match="no instance 400"):
        sprite(0, 400)
    with pytest.raises(VitseeError, match="0 pixels"):
        sprite(0, 0, 0)

"""Which samples are chosen and in which order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitsee_core.images import DataError, ImageSource, open_source, select
from vitsee_core.images.decoding import ArrayOpener
from vitsee_core.images.selection import random_order


def make(labels: list[int], class_names: list[str] | None = None) -> ImageSource:
    n = len(labels)
    return ImageSource(
        name="data",
        opener=ArrayOpener(np.zeros((n, 2, 2), np.uint8)),
        locations=range(n),
        ids=[f"i{k}" for k in range(n)],
        labels=np.array(labels, np.int64),
        splits=[""] * n,
        class_names=class_names,
    )


def test_the_order_is_that_of_raw_draws_whatever_the_machine() -> None:
    # Fixed once: a store made years ago must pair with one made today.
    assert random_order(10, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    draws = np.random.default_rng(7).bit_generator.random_raw(50)
    assert random_order(50, 7).tolist() == np.argsort(draws).tolist()


@given(n=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_the_order_is_a_permutation(n: int, seed: int) -> None:
    assert sorted(random_order(n, seed).tolist()) == list(range(n))


def test_same_data_and_seed_give_the_same_samples_in_any_model_of_selection() -> None:
    source = make([k % 3 for k in range(90)])
    whole, other = select(source, seed=1), select(source, seed=2)
    again = select(make([k % 3 for k in range(90)]), seed=1)
    assert whole.samples.fingerprint() == again.samples.fingerprint()
    assert whole.samples.ids != other.samples.ids
    assert sorted(whole.samples.ids) == sorted(source.ids)
    assert whole.samples.ids == [source.ids[k] for k in whole.samples.index]
    assert select(source, images=20, seed=1).samples.ids == whole.samples.ids[:20]
    assert len(whole) == 90 and not whole.notes
    none = dict.fromkeys(("images", "per_class", "split", "only"))
    assert whole.identity == {"seed": 1, "order": "shuffled", **none}


def test_dataset_order_takes_the_first_images() -> None:
    chosen = select(make([0] * 30), images=7, order="dataset", seed=3)
    assert chosen.samples.index.tolist() == list(range(7))


def test_shuffled_images_are_a_random_sample() -> None:
    source = make([k // 100 for k in range(1000)])
    counts = np.bincount(select(source, images=500).samples.labels, minlength=10)
    # Hypergeometric: mean 50, standard deviation 4.7; bounds at 4 of them.
    assert (np.abs(counts - 50) < 19).all() and len(set(counts.tolist())) > 1


def test_per_class_is_balanced_nested_and_free_of_unlabelled_samples() -> None:
    source = make([-1, *([0] * 20), *([1] * 30), -1, *([2] * 25)])
    few, more = (select(source, per_class=k, seed=5) for k in (4, 9))
    assert np.bincount(few.samples.labels).tolist() == [4, 4, 4]
    assert np.bincount(more.samples.labels).tolist() == [9, 9, 9]
    assert set(few.samples.ids) < set(more.samples.ids)
    assert few.samples.labels.tolist() != sorted(few.samples.labels.tolist())
    ordered = select(source, per_class=4, seed=5, order="dataset")
    assert set(ordered.samples.ids) == set(few.samples.ids)
    assert (np.diff(ordered.samples.index) > 0).all()


def test_small_classes_are_named_in_one_line() -> None:
    chosen = select(make([0, 0, 0, 1, 2, 2], ["cat", "dog", "emu", "fox"]), per_class=3)
    assert np.bincount(chosen.samples.labels).tolist() == [3, 1, 2]
    assert chosen.notes == (
        "fewer than 3 images in 3 classes: dog (1), emu (2), fox (0)",
    )
    bare = select(make([0, 0, 0, 7, 9, 9]), per_class=3)
    assert bare.notes == ("fewer than 3 images in 2 classes: 7 (1), 9 (2)",)
    many = select(make(list(range(40))), per_class=2)
    assert many.notes[0].endswith("0 (1), 1 (1), 2 (1), 3 (1), 4 (1) and 35 more")
    huge = select(make([0, 2**61]), per_class=1)
    assert sorted(huge.samples.labels.tolist()) == [0, 2**61]


def test_more_images_than_there_are_is_said() -> None:
    chosen = select(make([0] * 5), images=9)
    assert len(chosen) == 5
    assert chosen.notes == ("data has 5 images, fewer than 9: all taken",)


def test_a_part_is_shuffled_by_its_own_size(tmp_path: Path) -> None:
    source = open_source("demo:train[:50]")
    chosen = select(source, images=10)
    assert chosen.samples.index.tolist() == random_order(50, 0)[:10].tolist()
    assert set(chosen.samples.split.tolist()) == {"train"}
    assert chosen.identity["split"] == "train[:50]"
    assert chosen.class_names == source.class_names


def test_what_is_refused() -> None:
    source = make([-1, -1])
    cases = {
        "expected one of: shuffled, dataset": {"order": "random"},
        "the seed is -1": {"seed": -1},
        "expected one of them": {"images": 1, "per_class": 1},
        "0 images; expected 1 or more": {"images": 0},
        "-3 images per class": {"per_class": -3},
        "has no labels": {"per_class": 1},
    }
    for phrase, options in cases.items():
        with pytest.raises(DataError, match=phrase):
            select(source, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no images"):
        select(make([]))

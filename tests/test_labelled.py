"""Rows with labels, what fits together, vectors, baselines, intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.stores import CNN_PAIR, write_labelled
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.truth.labels.labelled_rows import (
    accuracy_interval,
    check_disjoint,
    check_label_spaces,
    labelled_rows,
    random_features,
    random_pieces,
)
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.samples import decode_ids

Array = NDArray[Any]


def chosen(store: Store, site: str, tokens: str | None = None) -> SiteFeatures:
    return choose_features(store, store.site(site), tokens, one_vector=True)


def features(n: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(n, 3, 4)),
        "blocks.0.out": rng.normal(size=(n, 3, 4)),
        "pooled": rng.normal(size=(n, 4)),
    }


# ---------------------------------------------------------------- rows


def test_only_readable_rows_with_a_label(tmp_path: Path) -> None:
    labels = [0, 1, -1, 2, 1, 0, -1, 2, 2, 0]
    valid = [1, 1, 1, 0, 1, 1, 0, 1, 1, 1]
    index = np.arange(10)[::-1]
    more: dict[str, Any] = {"valid": valid, "index": index.tolist(), "slab": 4}
    store = write_labelled(tmp_path / "a.zarr", features(10), labels, **more)
    rows = labelled_rows(store)
    assert rows.rows.tolist() == [0, 1, 4, 5, 7, 8, 9]
    assert rows.labels.tolist() == [0, 1, 1, 0, 2, 2, 0]
    assert rows.index.tolist() == [9, 8, 5, 4, 2, 1, 0]
    assert rows.labels.dtype == rows.index.dtype == np.int64
    assert np.flatnonzero(rows.mask).tolist() == rows.rows.tolist()
    assert rows.classes == ["a", "b", "c"]
    left_out = {"invalid": 2, "unlabelled": 1}
    assert rows.describe() == {"rows": 7, "left_out": left_out, "chosen": "all"}


def test_labels_alone_make_no_strings_of_a_million_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_labelled(tmp_path / "a.zarr", {"norm": np.zeros((3, 4))}, [0, 1, 1])
    decoded: list[int] = []

    def count(encoded: NDArray[np.uint8]) -> list[str]:
        decoded.append(len(encoded))
        return decode_ids(encoded)

    monkeypatch.setattr("vitsee_stores.samples.decode_ids", count)
    assert labelled_rows(store).labels.tolist() == [0, 1, 1]
    assert decoded == []
    assert store.samples.id.tolist() == ["0-0", "0-1", "0-2"]
    assert decoded == [3]


def test_the_first_rows_of_a_shuffled_store_and_a_split(tmp_path: Path) -> None:
    splits = ["train", "test"] * 5
    store = write_labelled(tmp_path / "a.zarr", features(10), [0, 1] * 5, splits=splits)
    assert labelled_rows(store, images=4).rows.tolist() == [0, 1, 2, 3]
    rows = labelled_rows(store, images=6, split="test")
    assert rows.rows.tolist() == [1, 3, 5]
    assert rows.how == "the first 6, of split test"
    with pytest.raises(
        MissingInput, match="no split 'val'; its data has splits train, test"
    ):
        labelled_rows(store, split="val")


def test_classes_are_those_of_the_data_set(tmp_path: Path) -> None:
    named = write_labelled(
        tmp_path / "a.zarr", features(4), [0, 0, 1, 1], classes=list("xyz")
    )
    assert labelled_rows(named).classes == ["x", "y", "z"]
    plain = write_labelled(tmp_path / "b.zarr", features(4), [0, 0, 3, -1], classes=[])
    assert labelled_rows(plain, images=2).classes == ["0", "1", "2", "3"]


def test_no_labels(tmp_path: Path) -> None:
    store = write_labelled(tmp_path / "a.zarr", features(4), [-1] * 4)
    with pytest.raises(
        MissingInput, match=r"^a has no label for any of its 4 readable images"
    ):
        labelled_rows(store)


# ---------------------------------------------------------------- what fits together


@pytest.mark.slow
def test_label_spaces(tmp_path: Path) -> None:
    def rows(name: str, labels: list[int], classes: list[str]) -> Any:
        store = write_labelled(
            tmp_path / name, features(len(labels)), labels, classes=classes
        )
        return labelled_rows(store)

    a = rows("a.zarr", [0, 1, 2], ["cat", "dog", "eel"])
    assert check_label_spaces(a, rows("b.zarr", [0, 0], ["cat", "dog", "eel"])) == []
    bare = rows("c.zarr", [0, 2], [])
    said = "c names no classes: its labels are matched with those of a by number"
    assert check_label_spaces(a, bare) == check_label_spaces(bare, a) == [said]
    assert check_label_spaces(bare, rows("g.zarr", [0, 1], [])) == []
    for name, labels, classes, line in (
        (
            "d",
            [0, 1, 2],
            ["cat", "eel", "dog"],
            r"^a and d .*: class 1 is 'dog' against 'eel' \(",
        ),
        ("e", [0, 1], ["cat", "dog"], r": 3 classes against 2 \("),
        ("f", [0, 5], [], r"f has label 5, a 3 classes"),
    ):
        with pytest.raises(StoreMismatch, match=line):
            check_label_spaces(a, rows(f"{name}.zarr", labels, classes))


def test_shared_images(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "a.zarr", features(6), [0, 1] * 3)
    test = write_labelled(tmp_path / "b.zarr", features(8), [0, 1] * 4, hash_offset=4)
    a, b = labelled_rows(train), labelled_rows(test)
    with pytest.raises(
        StoreMismatch, match=r"^2 of the 8 test images of b are in a too \(4-0, 4-"
    ):
        check_disjoint(a, b)
    assert check_disjoint(a, b, allow_shared=True) == 2
    # only rows that are used count
    assert check_disjoint(labelled_rows(train, images=4), b) == 0


# ---------------------------------------------------------------- vectors


def test_default_tokens(tmp_path: Path) -> None:
    vit = write_labelled(tmp_path / "a.zarr", features(4), [0, 1, 0, 1])
    assert chosen(vit, "blocks.0.out").selection == "cls"
    assert chosen(vit, "blocks.0.out", "mean").selection == "mean"
    assert chosen(vit, "pooled", "mean").selection == "all"
    values = {"stem": np.zeros((2, 2, 4))}
    cnn = write_labelled(tmp_path / "b.zarr", values, [0, 1], layout=CNN_PAIR)
    assert chosen(cnn, "stem").selection == "mean"


def test_each_token(tmp_path: Path) -> None:
    values = features(10)
    valid = [1, 1, 0, 1, 1, 1, 1, 1, 1, 1]
    labels = [0, 1, 0, 1, -1, 1, 0, 1, 0, 1]
    store = write_labelled(tmp_path / "a.zarr", values, labels, slab=3, valid=valid)
    rows = labelled_rows(store)
    x = values["blocks.0.out"].astype(np.float32)[[0, 1, 3, 5, 6, 7, 8, 9]]
    for tokens, expected in {
        "cls": x[:, 0],
        "first": x[:, 0],
        "mean": x[:, 1:].mean(1),
        "mean-all": x.mean(1),
        "rest": x[:, 1:].mean(1),
        "0,1": x[:, 2],
    }.items():
        for jobs, memory in ((1, None), (3, None), (3, 1)):
            read = chosen(store, "blocks.0.out", tokens)
            pieces = list(read.vectors(rows.mask, jobs=jobs, memory=memory))
            got = np.concatenate(pieces)
            assert got.dtype == np.float32
            # float32 means, made in float64
            assert np.allclose(got, expected, rtol=1e-6, atol=1e-7), tokens
            assert len(pieces) == 4
    vector = np.concatenate(list(chosen(store, "pooled").vectors(rows.mask)))
    assert np.array_equal(vector, values["pooled"].astype(np.float32)[rows.rows])


def test_pooled_stores_serve_cls_and_mean(tmp_path: Path) -> None:
    store = write_labelled(
        tmp_path / "a.zarr", features(4), [0, 1, 0, 1], tokens="pooled"
    )
    for tokens in ("cls", "mean"):
        assert next(chosen(store, "embed", tokens).vectors(store.valid)).shape == (4, 4)
    with pytest.raises(MissingInput, match="--tokens embed=all"):
        chosen(store, "embed", "rest")


def test_several_tokens_are_no_vector(tmp_path: Path) -> None:
    store = write_labelled(tmp_path / "a.zarr", features(4), [0, 1, 0, 1])
    with pytest.raises(SiteError, match="several tokens of embed"):
        chosen(store, "embed", "patches")
    with pytest.raises(SiteError, match="9,9"):
        chosen(store, "embed", "9,9")


def test_one_token_has_no_rest(tmp_path: Path) -> None:
    one = TokenLayout((), (1, 1), stride_px=(16.0, 16.0))
    values = {"embed": np.ones((4, 1, 3))}
    store = write_labelled(tmp_path / "a.zarr", values, [0, 1, 0, 1], layout=one)
    with pytest.raises(SiteError, match="embed has no tokens but the first"):
        chosen(store, "embed", "rest")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    values = features(6)
    values["pooled"][4, 1] = np.inf
    store = write_labelled(tmp_path / "a.zarr", values, [0, 1] * 3, slab=3)
    with pytest.raises(
        VitseeError, match=r"numbers in pooled that are not finite, in rows 3 to 5"
    ):
        list(chosen(store, "pooled").vectors(labelled_rows(store).mask))


# ---------------------------------------------------------------- baselines and intervals


def test_random_features() -> None:
    x = random_features(4000, 5, 3)
    assert x.dtype == np.float32 and x.shape == (4000, 5)
    assert np.array_equal(x, random_features(4000, 5, 3))
    assert not np.array_equal(x, random_features(4000, 5, 4))
    # 5 standard errors of a mean and of a variance over 20,000 numbers
    assert abs(x.mean()) < 5 / math.sqrt(20000)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / 20000)


def test_random_pieces_do_not_repeat() -> None:
    pieces = list(random_pieces(2500, 3, (7, 1)))
    assert [len(piece) for piece in pieces] == [1024, 1024, 452]
    assert not np.array_equal(pieces[0], pieces[1])
    assert np.array_equal(pieces[2], list(random_pieces(2500, 3, (7, 1)))[2])


def test_wilson_by_hand() -> None:
    # p = 0.8, n = 10, z = 1.96: centre (0.8 + 0.19208) / 1.38416, half 1.96 sqrt(...) / 1.38416
    right = np.array([True] * 8 + [False] * 2)
    value, std, low, high = accuracy_interval(right)
    assert value == 0.8
    assert std == pytest.approx(np.std(right, ddof=1), rel=1e-14)
    z = 1.959963984540054
    # the interval's ends are where |p - q| = z sqrt(q (1 - q) / n)
    for q in (low, high):
        assert abs(0.8 - q) == pytest.approx(z * math.sqrt(q * (1 - q) / 10), rel=1e-12)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)


def test_intervals_at_the_ends() -> None:
    z2 = 1.959963984540054**2
    value, std, low, high = accuracy_interval(np.ones(20, bool))
    assert (value, std, high) == (1.0, 0.0, 1.0)
    assert low == pytest.approx(20 / (20 + z2), rel=1e-12)
    value, std, low, high = accuracy_interval(np.zeros(20, bool))
    assert (value, low) == (0.0, 0.0)
    assert high == pytest.approx(z2 / (20 + z2), rel=1e-12)
    value, std, low, high = accuracy_interval(np.ones(1, bool))
    assert value == 1.0 and math.isnan(std) and 0 < low < high == 1
    assert all(math.isnan(x) for x in accuracy_interval(np.ones(0, bool)))

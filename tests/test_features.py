"""The reader of features: every selection of tokens, in every form, against arrays in memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.stores import write_labelled
from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.features.matrix import FeatureBlock, _contiguous_columns
from vitsee_core.features.reader import BLOCK_VALUES, widened
from vitsee_core.similarity.stacks import TokenStack
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch
from vitsee_stores.layout import TokenLayout

N, DIM = 11, 3
VIT = TokenLayout(("cls", "reg0"), (2, 3), stride_px=(16.0, 16.0))
CNN = TokenLayout((), (2, 3), stride_px=(16.0, 16.0))
VECTORS = ("cls", "mean", "mean-all", "first", "rest", "1,2")
SEVERAL = ("all", "each", "patches", "prefix")
KEPT = np.array([0, 1, 2, 4, 5, 6, 8, 9, 10])  # rows 3 and 7 could not be read


def values(layout: TokenLayout) -> NDArray[np.float64]:
    """Such as float16 holds, so that nothing is rounded."""
    rng = np.random.default_rng(0)
    return rng.integers(-200, 200, (N, layout.n_tokens, DIM)) / 16


def store_of(path: Path, layout: TokenLayout, **options: object) -> Store:
    valid = np.isin(np.arange(N), KEPT).astype(int)
    sites = {"blocks.0.out": values(layout)}
    return write_labelled(
        path,
        sites,
        [0] * N,
        layout=layout,
        slab=4,
        valid=valid,
        **options,  # type: ignore[arg-type]
    )  # type: ignore[arg-type]


def expected(layout: TokenLayout, word: str) -> NDArray[np.float64]:
    """(images, vectors, dim), by the definition of each word."""
    x = values(layout)[KEPT]
    prefix, n = layout.n_prefix, layout.n_tokens
    tokens = {
        "cls": [0],
        "first": [0],
        "rest": list(range(1, n)),
        "mean": list(range(prefix, n)),
        "1,2": [prefix + 3 + 2],
        "patches": list(range(prefix, n)),
        "prefix": list(range(prefix)),
    }.get(word, list(range(n)))
    chosen = np.stack([x[:, token] for token in tokens], axis=1)
    return (
        chosen.mean(1, keepdims=True) if word in ("mean", "mean-all", "rest") else chosen
    )


def chosen(store: Store, word: str | None) -> SiteFeatures:
    return choose_features(store, store.site("blocks.0.out"), word)


CASES = [(VIT, word) for word in (*VECTORS, *SEVERAL)] + [
    (CNN, word) for word in (*VECTORS[1:], "all", "each", "patches")
]


@pytest.mark.parametrize(("layout", "word"), CASES)
def test_every_form_of_every_selection(
    tmp_path: Path, layout: TokenLayout, word: str
) -> None:
    store = store_of(tmp_path / "a.zarr", layout)
    features, truth = chosen(store, word), expected(layout, word)
    mask = store.valid
    got = np.concatenate(list(features.blocks(mask)))
    assert got.dtype == np.float32 and got.shape == truth.shape
    # means are made in float64 and kept in float32
    assert np.allclose(got, truth, rtol=1e-6, atol=0)
    assert len(features.tokens) == truth.shape[1] and features.dim == DIM
    for n_tokens in (1, 2, 4, 100):  # the same in groups of tokens, cut wherever
        groups = features.groups(n_tokens)
        assert [i for part in groups for i in range(part.start, part.stop)] == list(
            range(truth.shape[1])
        )
        parts = [
            np.concatenate(list(features.blocks(mask, part, jobs=2))) for part in groups
        ]
        assert np.array_equal(np.concatenate(parts, axis=1), got)
    matrix = features.matrix()
    for columns in (1, 5, 1000):
        strips = matrix.strips(columns)
        assert max(strip.n_columns for strip in strips) <= columns
        whole = np.concatenate([strip.read(slice(0, N)) for strip in strips], axis=1)
        assert np.array_equal(whole[KEPT].astype(np.float32), got.reshape(len(KEPT), -1))
        assert all(
            np.array_equal(in_pieces(strip), strip.read(FIRST)) for strip in strips
        )
    if truth.shape[1] == 1:
        vectors = np.concatenate(list(features.vectors(mask, jobs=3, memory=1)))
        assert np.array_equal(vectors, got[:, 0])


FIRST = slice(0, 2)


def in_pieces(strip: FeatureBlock) -> NDArray[np.float64]:
    """Rows of the first slab, put together."""
    out = np.full((2, strip.n_columns), np.nan)
    for columns, values in strip.pieces(FIRST):
        assert np.isnan(out[:, columns]).all()
        out[:, columns] = values
    return out


def test_columns_that_follow_each_other_by_hand() -> None:
    """Of axes of 2, 3 and 4, side by side: column 12 i + 4 j + k."""

    def places(*target: tuple[int, int]) -> slice | None:
        return _contiguous_columns(tuple(slice(*part) for part in target), (2, 3, 4))

    assert places((0, 2), (0, 3), (0, 4)) == slice(0, 24)
    assert places((1, 2), (1, 3), (0, 4)) == slice(16, 24)
    assert places((1, 2), (2, 3), (1, 3)) == slice(21, 23)
    assert places((0, 2), (0, 2), (0, 4)) is None
    assert places((0, 1), (0, 2), (1, 4)) is None


def test_strips_of_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitsee_stores.layout.MIN_CHUNK_BYTES", 1)
    monkeypatch.setattr(
        "vitsee_stores.layout.MAX_CHUNK_BYTES", 4 * 3 * DIM * 4
    )  # a row of the grid
    store = store_of(tmp_path / "a.zarr", VIT)
    (strip,) = chosen(store, "patches").matrix().strips(1000)
    pieces = [columns for columns, _ in strip.pieces(FIRST)]
    assert pieces == [slice(0, 3 * DIM), slice(3 * DIM, 6 * DIM)]
    assert np.array_equal(in_pieces(strip), values(VIT)[:2, 2:].reshape(2, -1))


def test_a_vector_of_the_class_token_by_hand(tmp_path: Path) -> None:
    """Of four images in slabs of two, the second not readable: three vectors in two blocks."""
    x = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(float)
    store = write_labelled(
        tmp_path / "a.zarr", {"blocks.0.out": x}, [0] * 4, slab=2, valid=[1, 0, 1, 1]
    )
    blocks = [block.tolist() for block in chosen(store, None).vectors(store.valid)]
    assert blocks == [[[0.0, 1.0]], [[12.0, 13.0], [18.0, 19.0]]]


def test_tokens_are_named_in_order(tmp_path: Path) -> None:
    features = chosen(store_of(tmp_path / "a.zarr", VIT), "each")
    names = [token.name for token in features.tokens]
    assert names == ["cls", "reg0", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    assert features.n_prefix == 2 and [t.row for t in features.tokens[2:]] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]


def test_a_stack_takes_tokens_in_any_order(tmp_path: Path) -> None:
    store = store_of(tmp_path / "a.zarr", VIT)
    grid = TokenStack(chosen(store, "patches"), np.array([4, 1, 5]))
    truth = values(VIT)[:, 2:][:, [4, 1, 5]]
    assert np.array_equal(grid.read(slice(0, 3)), truth[:3])
    assert np.array_equal(grid.take(slice(1, 3)).read(slice(4, 6)), truth[4:6, 1:])
    assert (grid.n_matrices, grid.n_features) == (3, DIM)


def test_channels_of_a_matrix(tmp_path: Path) -> None:
    store = store_of(tmp_path / "a.zarr", VIT)
    matrix = chosen(store, "all").matrix(slice(1, 3))
    whole = np.concatenate(
        [strip.read(slice(0, 3)) for strip in matrix.strips(7)], axis=1
    )
    assert matrix.n_features == 8 * 2 and matrix.key[-1] == "channels 1-3"
    assert np.array_equal(whole, values(VIT)[:3, :, 1:].reshape(3, -1))


def test_the_memory_of_a_slab_counts_what_is_read(tmp_path: Path) -> None:
    """Two float32 copies of a slab of 4 images: one token where one is read, else all 8."""
    store = store_of(tmp_path / "a.zarr", VIT)
    for word, tokens in {"cls": 1, "1,2": 1, "mean": 1, "mean-all": 8, "all": 8}.items():
        assert chosen(store, word).slab_bytes == 2 * 4 * 4 * tokens * DIM, word


def test_pooled_stores_and_what_they_lack(tmp_path: Path) -> None:
    store = store_of(tmp_path / "a.zarr", VIT, tokens="pooled")
    for word in ("cls", "mean"):
        got = np.concatenate(list(chosen(store, word).vectors(store.valid)))
        assert np.allclose(got, expected(VIT, word)[:, 0], rtol=1e-6, atol=0)
    for word in ("each", "rest", "first", "0,0"):
        with pytest.raises(MissingInput, match="pooled only"):
            chosen(store, word)


def test_refusals(tmp_path: Path) -> None:
    vit, cnn = store_of(tmp_path / "v.zarr", VIT), store_of(tmp_path / "c.zarr", CNN)
    with pytest.raises(SiteError, match=r"c: blocks\.0\.out has no class token"):
        chosen(cnn, "cls")
    with pytest.raises(SiteError, match=r"no token 2,0: .*grid of 2 x 3, counted from 0"):
        chosen(vit, "2,0")
    with pytest.raises(SiteError, match="no tokens 'flat'; expected all, "):
        chosen(vit, "flat")
    with pytest.raises(
        SiteError, match=r"several tokens of blocks\.0\.out; expected one vector"
    ):
        choose_features(vit, vit.site("blocks.0.out"), "patches", one_vector=True)
    with pytest.raises(StoreMismatch, match="8 x 3 against 6 x 3"):
        check_alike(chosen(vit, "each"), chosen(cnn, "each"))


def test_a_site_without_tokens_is_read_as_it_is(tmp_path: Path) -> None:
    x = np.arange(10.0).reshape(5, 2)
    store = write_labelled(tmp_path / "a.zarr", {"pooled": x}, [0] * 5)
    features = choose_features(store, store.site("pooled"), "mean")
    assert (features.selection, features.has_tokens, features.dim) == ("all", False, 2)
    assert np.array_equal(np.concatenate(list(features.vectors(store.valid))), x)
    assert math.prod(features.matrix().parts[0][0].shape) == 10


def test_float16_is_widened_bit_by_bit() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = np.resize(every[np.isfinite(every)], (2 * BLOCK_VALUES // 512 + 1, 512))
    found, all_finite = widened(finite)
    assert all_finite and found.shape == finite.shape
    np.testing.assert_array_equal(
        found.view(np.uint32), finite.astype(np.float32).view(np.uint32)
    )
    few, all_finite = widened(finite[:3, ::2])
    np.testing.assert_array_equal(few, finite[:3, ::2].astype(np.float32))
    assert all_finite
    for value in (np.inf, -np.inf, np.nan):
        for place in (0, finite.size - 1):
            bad = finite.copy()
            bad.flat[place] = value
            found, all_finite = widened(bad)
            assert not all_finite
            np.testing.assert_array_equal(found, bad.astype(np.float32))
    same, all_finite = widened(few)
    assert same is few and all_finite

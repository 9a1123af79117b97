"""What is written comes back, through our reader and through plain zarr."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.random_stores import (
    PLANS,
    Array,
    create,
    expected,
    make_samples,
    slab_of,
    values,
    write,
)
from vitsee_stores import MissingInput, SiteError, Store, open_store
from vitsee_stores.layout import CODECS, StorePlan, arrays
from vitsee_stores.lazy import LazyArray
from vitsee_stores.manifest import new_manifest
from vitsee_stores.samples import Samples, samples_arrays, samples_from_arrays
from vitsee_stores.store_contents import Tokens


def read(group: zarr.Group, path: str) -> Array:
    node = group[path]
    assert isinstance(node, zarr.Array)
    return np.asarray(node[...])


def opened(tmp_path: Path, name: str) -> tuple[Store, dict[str, Array]]:
    write(tmp_path / "a.zarr", PLANS[name])
    return open_store(tmp_path / "a.zarr"), expected(PLANS[name])


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", PLANS)
def test_every_array_comes_back(tmp_path: Path, name: str, codec: str) -> None:
    plan = StorePlan(**{**vars(PLANS[name]), "codec": codec})
    write(tmp_path / "a.zarr", plan)
    store = open_store(tmp_path / "a.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(tmp_path / "a.zarr", mode="r")
        listed = {
            path for path, node in group.members(max_depth=None) if hasattr(node, "shape")
        }
        assert listed == set(arrays(store.plan))
        for path, spec in arrays(plan).items():
            if path.startswith("samples/") or spec.per == "commit":
                continue
            ours, theirs = store.array(path)[...], read(group, path)
            assert_array_equal(ours, values(plan, spec), strict=True)
            assert_array_equal(theirs, ours, strict=True)


def test_samples_come_back(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "vit")
    made = make_samples(10)
    samples = store.samples
    assert samples.id.tolist() == made.ids
    assert_array_equal(samples.index, made.index, strict=True)
    assert_array_equal(samples.label, made.labels, strict=True)
    assert samples.split.tolist() == made.splits
    assert_array_equal(samples.hash, whole["hash"], strict=True)
    assert_array_equal(samples.size, whole["size"], strict=True)
    assert_array_equal(samples.valid, whole["valid"] == 1, strict=True)
    assert len(samples) == store.n_images == 10
    assert store.class_names == ["a", "b"]
    assert store.manifest.info == {"loss": "Infinity"}
    assert store.manifest.samples_fingerprint == made.fingerprint()


@given(
    st.lists(
        st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_id_comes_back(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str]
) -> None:
    n = len(ids)
    samples = Samples(np.arange(n), ids, np.full(n, -1), [""] * n)
    manifest = new_manifest({}, StorePlan(n, 2, "none", ()), samples)
    back = samples_from_arrays(
        samples_arrays(samples, manifest.plan.id_bytes, manifest.splits), manifest.splits
    )
    assert back.ids == ids
    assert back.fingerprint() == samples.fingerprint() == manifest.samples_fingerprint


def test_boxes_come_back(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, "two-grids")
    assert store.manifest.features == ("box",)
    made = make_samples(5, boxes=True).boxes
    assert_array_equal(store.samples.box, made, strict=True)
    write(tmp_path / "b.zarr", PLANS["vit"])
    assert open_store(tmp_path / "b.zarr").samples.box is None
    arrays = samples_arrays(
        make_samples(5, boxes=True), store.plan.id_bytes, store.manifest.splits
    )
    for wrong in ([3, 0, 3, 1], [0, 2, 1, 1], [0, 0, np.inf, 1], [np.nan, 0, 1, 1]):
        arrays["samples/box"][2] = wrong
        with pytest.raises(ValueError, match="the box"):
            samples_from_arrays(arrays, store.manifest.splits)


def test_token_words_of_a_class_token_model(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "vit")
    for site in ("embed", "blocks.0.out"):
        prefix, grid = whole[f"acts/{site}/prefix"], whole[f"acts/{site}/grid"]
        everything = np.concatenate([prefix, grid.reshape(10, 15, 4)], 1)
        mean_all = everything.astype(np.float64).mean(1).astype(np.float32)
        rest = grid.reshape(10, 15, 4).astype(np.float64).mean(1).astype(np.float32)
        cases: dict[Tokens, Array] = {
            "all": everything,
            "each": everything,
            "patches": grid,
            "prefix": prefix,
            "cls": prefix[:, 0],
            "first": prefix[:, 0],
            (2, 4): grid[:, 2, 4],
            "2,4": grid[:, 2, 4],
            "mean": whole[f"pooled/{site}/mean"],
            "mean-all": mean_all,
            "rest": rest,
        }
        for tokens, wanted in cases.items():
            lazy = store.acts(site, tokens)
            assert lazy.shape == wanted.shape
            assert lazy.dtype == wanted.dtype
            assert_array_equal(lazy[:], wanted, strict=True)
            assert_array_equal(np.asarray(lazy), wanted, strict=True)
            parts = [slab.acts(site, tokens) for slab in store.slabs()]
            assert_array_equal(np.concatenate(parts), wanted, strict=True)


def test_tokens_of_other_layouts(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "cnn")
    grid = whole["acts/stem/grid"]
    assert_array_equal(store.acts("stem")[:], grid.reshape(7, 15, 4))
    assert_array_equal(store.acts("stem", "first")[:], grid[:, 0, 0])
    rows = whole["acts/blocks.0.token.hidden/rows"]
    assert_array_equal(store.acts("blocks.0.token.hidden")[:], rows)
    assert_array_equal(store.acts("blocks.0.token.hidden", "first")[:], rows[:, 0])
    assert_array_equal(store.acts("module")[:], whole["acts/module/raw"])
    assert_array_equal(
        store.acts("layer1.0.out", "mean")[:],
        whole["pooled/layer1.0.out/mean"],
        strict=True,
    )
    with pytest.raises(MissingInput, match=r"keeps layer1\.0\.out pooled only.*--tokens"):
        store.acts("layer1.0.out")
    for site, tokens, said in [
        ("stem", "cls", "no prefix tokens and a grid of 5 x 3"),
        ("stem", "prefix", "no prefix tokens"),
        ("stem", "5,0", "a grid of 5 x 3"),
        ("stem", "everything", "expected all, patches"),
        ("blocks.0.token.hidden", "patches", "6 rows that are no image grid"),
        ("module", "patches", "no token layout"),
    ]:
        with pytest.raises(SiteError, match=said):
            store.acts(site, tokens)
    with pytest.raises(SiteError, match="no class token"):
        store.pooled("stem", "cls")


def test_registers_and_a_class_token_that_is_not_first(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "registers")
    prefix = whole["acts/blocks.1.out/prefix"]
    layout = store.layout("blocks.1.out")
    assert layout is not None
    assert layout.cls == 1
    assert_array_equal(store.acts("blocks.1.out", "cls")[:], prefix[:, 1])
    assert_array_equal(store.acts("blocks.1.out", "first")[:], prefix[:, 0])
    assert store.acts("blocks.0.out", "prefix").shape == (3, 3, 4)


def test_names(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "vit")
    block = whole["acts/blocks.0.out/grid"]
    for name in ("blocks.0.out", "blocks.1.in", "blocks.-2.out", "blocks.-1.in"):
        assert_array_equal(store.acts(name, "patches")[:], block)
        assert store.site(name).name == "blocks.0.out"
    assert list(store.sites) == [site.name for site in PLANS["vit"].sites]
    assert store.sites["blocks.1.out"].stride_px == (16.0, 16.0)
    layout = store.layout("blocks.1.out")
    assert layout is not None and layout.offset_px == (-2.0, 4.5)
    chosen = [site.name for site in store.select("blocks")]
    assert chosen == ["embed", "blocks.0.out", "blocks.1.out"]
    with pytest.raises(
        MissingInput, match=r"no site matches 'blocks\.7\.out'.*vitsee info"
    ):
        store.acts("blocks.7.out")
    with pytest.raises(SiteError, match="several sites"):
        store.acts("blocks.*.out")


def test_summaries(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "vit")
    assert_array_equal(
        store.pooled("blocks.1.in", "cls")[:], whole["pooled/blocks.0.out/cls"]
    )
    assert_array_equal(store.vectors("logits")[:], whole["vectors/logits"])
    assert_array_equal(store.acts("logits", "cls")[:], whole["vectors/logits"])
    assert_array_equal(store.pooled("logits")[:], whole["vectors/logits"])
    assert_array_equal(store.attention("distance_px")[:], whole["attention/distance_px"])
    assert_array_equal(
        store.attention("full/blocks.1")[:], whole["attention/full/blocks.1"]
    )
    assert_array_equal(store.attention_sums("aligned")[:], whole["attention/aligned"])
    assert_array_equal(store.residual("blocks.0.mlp")[:], whole["residual/blocks.0.mlp"])
    assert store.attention_blocks == list(PLANS["vit"].attention)
    assert store.has("attention/rollout")
    assert not store.has("attention/nothing")
    for slab in store.slabs():
        rows = slab.rows
        assert_array_equal(slab.valid, whole["valid"][rows] == 1)
        assert_array_equal(
            slab.attention_sums("received"), whole["attention/received"][slab.k]
        )
        assert_array_equal(slab.attention("rollout"), whole["attention/rollout"][rows])
        assert_array_equal(slab.pooled("embed", "cls"), whole["pooled/embed/cls"][rows])
        assert_array_equal(slab.vectors("pooled"), whole["vectors/pooled"][rows])
        assert_array_equal(
            slab.residual("blocks.0.attn"), whole["residual/blocks.0.attn"][rows]
        )
        assert_array_equal(slab.inputs(), store.inputs()[rows])


def test_attention_on_two_grids(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "two-grids")
    second = store.attention_blocks[1].prefix
    path = f"attention/{second}/received_rows"
    assert_array_equal(store.attention("received_rows", second)[:], whole[path])
    assert store.attention("entropy", second).shape == (5, 2, 3)
    assert_array_equal(
        store.attention_sums("aligned", second)[:], whole[f"attention/{second}/aligned"]
    )


def test_inputs_are_normalised_as_the_model_saw_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    store, whole = opened(tmp_path, "vit")
    mean, std = (torch.tensor(store.manifest.transform[key]) for key in ("mean", "std"))
    # what torchvision's ToTensor and Normalize do
    pixels = torch.from_numpy(whole["input"]).to(torch.float32).div(255)
    wanted = pixels.sub(mean[:, None, None]).div(std[:, None, None]).numpy()
    wanted[whole["valid"] == 0] = np.nan
    assert_array_equal(store.inputs()[:], wanted, strict=True)
    assert_array_equal(
        store.inputs()[3:6, 1, ::2, -1], wanted[3:6, 1, ::2, -1], strict=True
    )


def test_what_a_store_lacks_is_named_with_the_option(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, "cnn")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: store.attention("distance_px"), "--attention summary"),
        (lambda: store.attention("cls_rows"), "--attention rows"),
        (lambda: store.attention("full/blocks.0"), "--attention full"),
        (lambda: store.residual("blocks.9.mlp"), "layer1.0"),
        (store.inputs, "--inputs"),
        (lambda: store.vectors("stem"), "no vector"),
    ]
    for call, said in calls:
        with pytest.raises(MissingInput) as error:
            call()
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_one_token_touches_only_the_chunks_that_hold_it(tmp_path: Path) -> None:
    plan = PLANS["chunked"]
    path = tmp_path / "a.zarr"
    write(path, plan)
    spec = arrays(plan)["acts/blocks.0.out/grid"]
    assert spec.grid[1] > 1, "the test is about several chunks a slab"
    row = spec.chunks[1]
    for chunk in (path / spec.path).glob("c.*"):
        if chunk.name.split(".")[2] != "1":
            chunk.unlink()
    for chunk in path.glob("acts/blocks.0.out/prefix/c.*"):
        chunk.unlink()
    got = open_store(path).acts("blocks.0.out", (row, 3))[:]
    assert_array_equal(got, values(plan, spec)[:, row, 3])


ARRAY = PLANS["vit"]


@pytest.fixture(scope="module")
def some_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("lazy") / "a.zarr"
    write(path, ARRAY)
    return open_store(path)


def indices(n: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.slices(n + 2), st.integers(-n, n - 1))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_slices_are_numpys(some_store: Store, data: st.DataObject) -> None:
    words: list[Tokens] = ["patches", "all", "mean-all", "rest", "cls", (1, 2)]
    tokens = data.draw(st.sampled_from(words))
    lazy = some_store.acts("embed", tokens)
    whole = lazy[...]
    index: list[Any] = [data.draw(indices(n)) for n in lazy.shape]
    index = index[: data.draw(st.integers(0, len(index)))]
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), Ellipsis)
    # an Ellipsis shifts what follows it to other axes, where an integer may be out of bounds
    try:
        wanted = whole[tuple(index)]
    except IndexError:
        with pytest.raises(IndexError):
            lazy[tuple(index)]
        return
    assert_array_equal(lazy[tuple(index)], wanted, strict=True)


def test_other_indices_and_iteration_are_refused(some_store: Store) -> None:
    lazy: LazyArray = some_store.acts("embed")
    for bad in (None, True, 1.0, ([0], [1])):
        with pytest.raises(TypeError, match="a lazy array takes"):
            lazy[bad]  # type: ignore[index]
    with pytest.raises(IndexError):
        lazy[0, 0, 0, 0]
    with pytest.raises(IndexError):
        lazy[10]
    with pytest.raises(TypeError):
        list(lazy)  # type: ignore[call-overload]
    assert "float16" in repr(lazy)
    assert lazy.size_bytes == 10 * 16 * 4 * 2


def test_first_images_only(some_store: Store) -> None:
    slabs = list(some_store.slabs(images=6))
    assert [(slab.k, slab.rows) for slab in slabs] == [(0, slice(0, 4)), (1, slice(4, 6))]
    assert len(slabs[1]) == len(slabs[1].acts("embed")) == 2
    assert [slab.k for slab in some_store.slabs(images=4)] == [0], (
        "not an empty second one"
    )


def test_committed_slabs_only(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.zarr", PLANS["vit"]
    writer = write(path, plan, slabs=[0, 1])
    # Slab 2 is half written: its chunks are whole, its marker is missing.
    whole = expected(plan)
    writer._write_chunks(2, writer._chunk_jobs(2, slab_of(plan, whole, 2)))
    store = open_store(path, allow_partial=True)
    assert not store.complete
    assert store.committed.tolist() == [True, True, False]
    assert [slab.k for slab in store.slabs()] == [0, 1]
    acts = store.acts("embed", "patches")[:]
    assert_array_equal(acts[:8], whole["acts/embed/grid"][:8])
    assert np.isnan(acts[8:]).all()
    assert not store.valid[8:].any()
    assert np.isnan(store.attention_sums("aligned")[2]).all()


def test_stores_travel_to_other_processes(some_store: Store) -> None:
    again: Store = pickle.loads(pickle.dumps(some_store))
    slab = pickle.loads(pickle.dumps(next(iter(some_store.slabs()))))
    assert_array_equal(again.acts("embed")[:], some_store.acts("embed")[:])
    assert_array_equal(slab.acts("embed"), some_store.acts("embed")[:4])


def test_arrays_travel_to_other_working_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = opened(tmp_path, "vit")
    monkeypatch.chdir(store.path.parent)
    acts = pickle.dumps(open_store(store.path.name).acts("embed", "patches"))
    monkeypatch.chdir("/")
    assert_array_equal(pickle.loads(acts)[:], whole["acts/embed/grid"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_read(tmp_path: Path) -> None:
    store, whole = opened(tmp_path, "vit")
    store.acts("embed")[:]  # the parent's threads run now, the child has none of them
    child = os.fork()
    if child == 0:
        same = np.array_equal(
            store.acts("embed", "patches")[:2], whole["acts/embed/grid"][:2], True
        )
        store.array("attention/aligned")[:]
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_label(tmp_path: Path) -> None:
    write(tmp_path / "deit.s16.zarr", PLANS["registers"])
    assert open_store(tmp_path / "deit.s16.zarr").label == "deit.s16"
    assert open_store(tmp_path / "deit.s16.zarr", label="DeiT").label == "DeiT"


def test_joining_needs_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", PLANS["vit"])
    assert create(tmp_path / "a.zarr", PLANS["vit"]).complete

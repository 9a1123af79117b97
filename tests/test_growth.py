"""Stores that grow: more sites or more images, equal to a store that was asked for at once."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.testing import assert_array_equal
from PIL import Image

from tests import s3
from tests.extractions import RESNET, VIT, array_bytes, extract, extracted, plant_images
from tests.grown_stores import add_images
from tests.random_stores import PLANS, write
from vitsee_cli.main import main
from vitsee_core.analyses import cka
from vitsee_core.extraction.sharding import complete_plan
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores import (
    IncompleteStore,
    Store,
    StoreError,
    describe,
    open_store,
    validate,
)
from vitsee_stores.generations import SEALS
from vitsee_stores.validation import remedy

N, FIRST, SLAB = 14, 10, 4  # the third slab of the first images is half empty
HOW = ["--slab", SLAB, "--batch-size", 3, "--workers", 0]
KEPT = ["--grams", "--erf", 9, "--inputs"]
MORE = {"vit": ["norms", "hidden"], "resnet": ["norms", "residual"]}
MODELS = {"vit": VIT, "resnet": RESNET}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N, damaged="class0/000.png")


def sites(*names: str) -> list[object]:
    return [word for name in names for word in ("--sites", name)]


def words(
    images: Path, path: object, n: int, *more: object, model: str = "vit"
) -> list[object]:
    """An extraction's words; options in `more` come in place of its own."""
    own = [*MODELS[model][1:], "--data", images, "--images", n, *HOW, "-o", path]
    pairs = [
        pair for pair in zip(own[::2], own[1::2], strict=True) if pair[0] not in more
    ]
    return [MODELS[model][0], *(word for pair in pairs for word in pair), *more]


def made(path: Path, images: Path, n: int = FIRST, model: str = "vit") -> Path:
    """The first generation."""
    extracted(*words(images, path, n, *KEPT, model=model))
    return path


@pytest.fixture(scope="module")
def first(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("first") / "a.zarr", images)


@pytest.fixture(scope="module")
def third(first: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three generations: sites, then images."""
    path = tmp_path_factory.mktemp("third") / "a.zarr"
    shutil.copytree(first, path)
    extracted(*words(images, path, FIRST, *sites(*MORE["vit"])))
    extracted(*words(images, path, N))
    return path


@pytest.fixture(scope="module")
def at_once(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("once") / "a.zarr"
    extracted(*words(images, path, N, *KEPT, *sites("blocks", "head", *MORE["vit"])))
    return path


@pytest.fixture
def store(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "a.zarr"))


@pytest.fixture
def grown(third: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(third, tmp_path / "a.zarr"))


def check_equal(grown: Store, at_once: Store) -> None:
    """Every number, every sum and every shape; and what pairs stores and finds sites."""
    assert grown.arrays.keys() == at_once.arrays.keys() - {*SEALS}
    for path in grown.arrays:
        assert_array_equal(grown.array(path)[...], at_once.array(path)[...], err_msg=path)
    assert grown.manifest.samples_fingerprint == at_once.manifest.samples_fingerprint
    assert grown.manifest.identity == at_once.manifest.identity
    assert grown.plan == at_once.plan
    assert grown.samples.id.tolist() == at_once.samples.id.tolist()
    assert_array_equal(grown.samples.split, at_once.samples.split)
    assert [site.name for site in grown.select(["all"])] == [
        site.name for site in at_once.select(["all"])
    ]


@pytest.mark.slow
def test_sites_then_images_are_what_a_run_for_all_gives(
    third: Path, at_once: Path
) -> None:
    store = open_store(third)
    assert (store.generation, store.n_images, store.complete) == (3, N, True)
    check_equal(store, open_store(at_once))
    assert validate(third, deep=True) == []
    for ours, theirs in zip(store.slabs(), open_store(at_once).slabs(), strict=True):
        assert_array_equal(ours.acts("blocks.0.norm1"), theirs.acts("blocks.0.norm1"))
        assert_array_equal(ours.grams("blocks.0.out"), theirs.grams("blocks.0.out"))


def test_what_was_there_is_not_touched(first: Path, third: Path) -> None:
    def files(path: Path) -> dict[str, bytes]:
        found = (
            p for p in path.rglob("*") if p.is_file() and "generations" not in p.parts
        )
        return {str(p.relative_to(path)): p.read_bytes() for p in found}

    assert files(third) == files(first)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit", "resnet"])
@pytest.mark.parametrize("order", ["shuffled", "dataset"])
def test_images_then_sites_by_two_shards(
    images: Path, tmp_path: Path, model: str, order: str
) -> None:
    """Readers see a generation only after its last shard."""
    grown, whole, more = tmp_path / "a.zarr", tmp_path / "b.zarr", sites(*MORE[model])
    extracted(*words(images, grown, FIRST, *KEPT, "--order", order, model=model))
    kept = (*KEPT, "--order", order, *sites("blocks", "head", *MORE[model]))
    extracted(*words(images, whole, N, *kept, model=model))
    for number, added in ((2, []), (3, more)):
        for shard in ("0/2", "1/2"):
            before = open_store(grown)
            done = extracted(
                *words(images, grown, N, *added, "--shard", shard, model=model)
            )
            assert before.generation == number - 1
            assert ("is not complete yet" in done.stderr) == (shard == "0/2")
        assert open_store(grown).generation == number
    check_equal(open_store(grown), open_store(whole))
    assert validate(grown, deep=True) == []


@pytest.mark.slow
def test_whole_slabs_of_the_data_set_s_classes_pooled_only(
    images: Path, tmp_path: Path
) -> None:
    """No slab is made again where the images before fill theirs; new sites have choices of their
    own."""
    grown, whole = tmp_path / "a.zarr", tmp_path / "b.zarr"
    extracted(*words(images, grown, 8))
    extracted(*words(images, grown, 12))
    norms = "blocks.*.norm?"
    extracted(*words(images, grown, 12, *sites(norms), "--tokens", "pooled"))
    pooled = ("--tokens", "all", "--tokens", f"{norms}=pooled")
    extracted(*words(images, whole, 12, *sites("blocks", "head", norms), *pooled))
    ours, theirs = open_store(grown), open_store(whole)
    assert ours.generations[1].first_slab == 2
    for path in ours.arrays:
        assert_array_equal(ours.array(path)[...], theirs.array(path)[...], err_msg=path)
    assert ours.plan == theirs.plan


@pytest.mark.slow
def test_a_reader_keeps_the_generation_that_it_opened(store: Path, images: Path) -> None:
    before = open_store(store)
    pickled = pickle.dumps(before)
    extracted(*words(images, store, FIRST, *sites("norms"), "--shard", "0/2"))
    assert "blocks.0.norm1" not in open_store(store).sites
    record = describe(store)
    assert (record["generation"], record["complete"]) == (1, True)
    assert [one["complete"] for one in record["generations"]] == [True, False]
    extracted(*words(images, store, FIRST, *sites("norms"), "--shard", "1/2"))
    assert "blocks.0.norm1" in open_store(store).sites
    for old in (before, pickle.loads(pickled)):
        assert old.generation == 1 and "blocks.0.norm1" not in old.sites
        assert old.acts("blocks.0.out")[:].shape[0] == FIRST


@pytest.mark.slow
def test_info_lists_the_generations_and_validate_checks_all(third: Path) -> None:
    shown = CliRunner().invoke(main, ["info", str(third)], terminal_width=200)
    assert shown.exit_code == 0, shown.output
    added = re.findall(r"^generation (\d adds .*): vitsee .*$", shown.stdout, re.M)
    assert len(added) == 2, shown.stdout
    assert re.match(r"2 adds \d+ sites \(blocks\.0\.norm1, ", added[0])
    assert re.match(
        rf"3 adds rows {FIRST} to {N - 1}, and has rows 8 to 9 anew", added[1]
    )
    record = describe(third)
    assert [one["rows"] for one in record["generations"]] == [[0, 9], [0, 9], [8, 13]]
    assert (record["n_slabs"], record["n_committed"], record["generation"]) == (4, 4, 3)
    assert (
        CliRunner()
        .invoke(main, ["validate", "--deep", str(third)])
        .stdout.startswith("ok: ")
    )


def test_a_result_says_of_which_generation_it_is(third: Path, first: Path) -> None:
    for path, number in ((first, 1), (third, 3)):
        made = describe_run([open_store(path)], command=["vitsee"], parameters={})
        assert made["stores"][0]["generation"] == number


@pytest.mark.slow
def test_gram_matrices_are_kept_where_the_rows_stayed(store: Path, images: Path) -> None:
    cache = store.with_name("a.zarr.grams")

    def matrices(*names: str) -> set[str]:
        cka.run(open_store(store), sites=names)
        return {path.name for path in cache.glob("*.tiles")}

    old = matrices("blocks")
    extracted(*words(images, store, FIRST, *sites("norms")))
    assert matrices("blocks") == old
    more = matrices("blocks", "norms")
    assert old < more
    extracted(*words(images, store, N))
    assert len(matrices("blocks", "norms")) == 2 * len(more)


@pytest.mark.slow
def test_commands_of_earlier_generations_have_nothing_to_do(
    grown: Path, images: Path
) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in grown.rglob("*") if path.is_file()
    }
    for n, more in (
        (FIRST, KEPT),
        (FIRST, sites("norms")),
        (N, []),
        (N, sites("hidden")),
    ):
        done = extracted(*words(images, grown, n, *more))
        assert f"{grown} is complete ({N} images): nothing to do" in done.stderr, (
            done.stderr
        )
    assert before == {
        path: path.stat().st_mtime_ns for path in grown.rglob("*") if path.is_file()
    }


def test_a_repeated_command_counts_what_was_added_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the manifests alone: of 3, 5 and 7 images, the last two made by one command."""
    path = tmp_path / "a.zarr"
    write(path, PLANS["registers"])
    for _ in range(2):
        add_images(path, 2)
    monkeypatch.chdir("/")
    plan = complete_plan("vitsee extract", path)
    assert plan is not None and plan.n_images == 7
    assert complete_plan("vitsee extract --seed 1", path) is None


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_added(store: Path, images: Path) -> None:
    done = extracted(*words(images, store, FIRST, *sites("norms"), "--dry-run"))
    assert re.search(
        r"generation 2 of .* adds \d+ sites \(blocks\.0\.norm1, ", done.stderr
    )
    total = int(done.stdout.splitlines()[1].split(",")[3])
    assert not (store / "generations").exists()
    extracted(*words(images, store, FIRST, *sites("norms")))
    assert describe(store)["generations"][1]["size_bytes"] == total
    done = extracted(*words(images, store, N, "--dry-run"))
    assert "generation 3 of" in done.stderr
    assert "adds 4 images to 10, and makes the last 2 images again" in done.stderr


REFUSED: dict[str, tuple[list[object], str]] = {
    "another seed": (["--seed", 1], "seed is 0, given 1.*more --sites or more --images"),
    "another order": (["--order", "dataset"], "order is shuffled, given dataset"),
    "other weights": (["--random-init", 1], "weights is .*, given --random-init 1"),
    "another size": (["--img-size", "48x48"], "model.input_size|model.args"),
    "another crop": (["--crop-pct", "1"], "transform.crop_pct"),
    "another precision": (["--precision", "bf16"], "precision is fp32, given bf16"),
    "another slab": (["--slab", 5], "slab is 4, given 5"),
    "more attention": (["--attention", "full"], "attention is summary, given full"),
    "fewer arrays": (
        ["--no-grams"],
        "grams is True, given False|grams is true, given false",
    ),
    "another type of a stored site": (
        [*sites("blocks"), "--dtype", "float32"],
        "embed, blocks.* stored with dtype float16, given float32",
    ),
    "an intervention": (
        ["--ablate-heads", "blocks.0:0", *sites("norms")],
        "interventions is ",
    ),
    "fewer images": (["--images", 9], "n_images is 10, given 9"),
    "images and sites": (
        ["--images", N, *sites("norms")],
        "one after the other, first with",
    ),
    "images of each class": (["--per-class", 6], "images can be added by --images only"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_grow_is_refused_untouched(
    first: Path, images: Path, name: str
) -> None:
    given, line = REFUSED[name]
    own = words(images, first, FIRST, *given)
    if "--per-class" in given:
        own = [word for word in own if word not in ("--images", FIRST)]
    done = extract(*own)
    assert done.exit_code == 1 and done.stdout == "", done.output
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(line, last), last
    assert not (first / "generations").exists()


def test_more_images_are_asked_for_by_number(first: Path, images: Path) -> None:
    own = [
        word for word in words(images, first, FIRST) if word not in ("--images", FIRST)
    ]
    done = extract(*own)
    assert done.exit_code == 1 and f"--images {N} would add the others" in done.stderr


@pytest.mark.slow
def test_something_else_waits_for_what_is_being_added(store: Path, images: Path) -> None:
    extracted(*words(images, store, FIRST, *sites("norms"), "--shard", "0/2"))
    done = extract(*words(images, store, FIRST, *sites("hidden")))
    assert done.exit_code == 1
    assert (
        "generations/2 is unfinished (2 of 3 slabs), and this asks for something"
        in done.stderr
    )
    shown = CliRunner().invoke(main, ["info", str(store)], terminal_width=200).stdout
    assert "being added (2 of 3 slabs), not read yet" in shown
    done = extract(*words(images, store / "generations" / "2", FIRST))
    assert done.exit_code == 1 and "is a generation of the store above it" in done.stderr
    extracted(*words(images, store, FIRST, *sites("norms")))
    assert open_store(store).generation == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 9])
def test_an_image_that_changed_is_not_added(
    first: Path, images: Path, tmp_path: Path, row: int
) -> None:
    """Whether among those that are compared before, or met later on."""
    store, copy = tmp_path / "a.zarr", tmp_path / "images"
    shutil.copytree(first, store)
    shutil.copytree(images, copy)
    name = str(open_store(store).samples.id[row])
    Image.new("RGB", (50, 60), (row, 90, 90)).save(copy / name)
    done = extract(*words(copy, store, FIRST, *sites("norms")))
    assert done.exit_code == 1 and name in done.stderr.splitlines()[-1], done.stderr
    assert open_store(store).generation == 1


@pytest.mark.slow
def test_hashes_are_compared_slab_by_slab(
    store: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that was replaced after the comparison of some of them."""
    from vitsee_core.extraction import growth

    monkeypatch.setattr(growth, "check_same_images", lambda *given: None)
    path = images / str(open_store(store).samples.id[9])
    before = path.read_bytes()
    try:
        Image.new("RGB", (50, 60)).save(path)
        done = extract(*words(images, store, FIRST, *sites("norms")))
    finally:
        path.write_bytes(before)
    assert done.exit_code == 1 and "nothing of these is added" in done.stderr, done.stderr
    assert open_store(store).generation == 1


def test_a_model_that_does_not_give_what_is_stored_is_refused(
    store: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its weights' hash says."""
    from vitsee_core.images import normalise

    monkeypatch.setattr(
        "vitsee_core.models.same_origin.normalise",
        lambda x, *given: normalise(255 - x, *given),
    )
    done = extract(*words(images, store, FIRST, *sites("norms")))
    assert done.exit_code == 1, done.output
    assert re.search(
        r"does not give what .* has of .* on the first images: 0?\.?\d", done.stderr
    )


@pytest.mark.slow
def test_damage_is_named_by_generation_and_made_again(
    grown: Path, at_once: Path, images: Path
) -> None:
    chunk = grown / "generations/2/acts/blocks.0.norm1/grid/c.1.0.0.0"
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(
        StoreError, match=r"generations/2 is damaged: acts/blocks.0.norm1/grid"
    ):
        open_store(grown).acts("blocks.0.norm1")[:]
    open_store(grown).acts("blocks.0.out")[:]
    damage = validate(grown, deep=True)
    assert len(damage) == 1
    assert damage[0].startswith("generations/2: acts/blocks.0.norm1/grid, slab 1: ")
    assert remedy(damage).startswith("delete generations/2/commits/c.1.0, then repeat")
    (grown / "generations/2/commits/c.1.0").unlink()
    with pytest.raises(
        IncompleteStore, match="generations/2 is incomplete: 2 of 3 slabs"
    ):
        open_store(grown)
    partly = open_store(grown, allow_partial=True)
    assert_array_equal(partly.committed, [True, False, True, True])
    done = extract(*words(images, grown, FIRST, *KEPT))
    assert (
        done.exit_code == 1
        and "lacks 1 slab: repeat the command that made it" in done.stderr
    )
    extracted(*words(images, grown, FIRST, *sites(*MORE["vit"])))
    assert validate(grown, deep=True) == []
    check_equal(open_store(grown), open_store(at_once))


@pytest.mark.slow
def test_generations_are_of_one_store_and_without_a_gap(
    grown: Path, first: Path, images: Path, tmp_path: Path
) -> None:
    other = made(tmp_path / "b.zarr", images)
    shutil.copytree(grown / "generations", other / "generations")
    with pytest.raises(
        StoreError, match=r"no generation of .*: it was not added to these"
    ):
        open_store(other)
    assert any("was not added to these" in line for line in validate(other))
    shutil.rmtree(grown / "generations/2")
    with pytest.raises(
        StoreError, match="generation 2 is missing, and generation 3 is built on"
    ):
        open_store(grown)
    shutil.rmtree(grown / "generations")
    assert open_store(grown).generation == 1, "the last ones can be removed"
    assert array_bytes(grown) == array_bytes(first)
    with pytest.raises(IncompleteStore):
        (grown / "commits/c.0.0").unlink()
        open_store(grown)


@pytest.mark.slow
def test_a_store_in_a_bucket_grows(images: Path, at_once: Path, tmp_path: Path) -> None:
    with s3.server() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment(port).items():
            patch.setenv(name, value)
        s3.make_bucket(port, "grows")
        url = "s3://grows/runs/a.zarr"
        extracted(*words(images, url, FIRST, *KEPT))
        extracted(*words(images, url, FIRST, *sites(*MORE["vit"]), "--shard", "claims"))
        extracted(*words(images, url, N, "--shard", "0/2"))
        assert open_store(url).generation == 2
        extracted(*words(images, url, N, "--shard", "1/2"))
        assert validate(url, deep=True) == []
        check_equal(open_store(url), open_store(at_once))
        s3.download(url, tmp_path / "a.zarr")
        check_equal(open_store(tmp_path / "a.zarr"), open_store(at_once))
        extracted(*words(images, url, N, "--force"))
        assert open_store(url).generation == 1


@pytest.mark.slow
def test_the_room_of_ids_and_splits_grows(tmp_path: Path) -> None:
    """Longer names and further splits than those of the first images."""
    names = [f"{i}.png" if i < 4 else f"a-much-longer-name-{i}.png" for i in range(8)]
    listed = tmp_path / "list.csv"
    for name in names:
        Image.new("RGB", (20, 20), (len(name), 3, 9)).save(tmp_path / name)
    rows = [f"{name},{'train' if i < 5 else 'test'}" for i, name in enumerate(names)]
    listed.write_text("\n".join(["path,split", *rows]) + "\n")
    how: list[Any] = ["--order", "dataset", "--slab", 4, "--sites", "head"]
    extracted(*VIT, "--data", listed, "--images", 4, *how, "-o", tmp_path / "a.zarr")
    extracted(*VIT, "--data", listed, "--images", 8, *how, "-o", tmp_path / "a.zarr")
    store = open_store(tmp_path / "a.zarr")
    assert store.samples.id.tolist() == names
    assert store.samples.split.tolist() == ["train"] * 5 + ["test"] * 3
    assert np.isfinite(store.vectors("logits")[:]).all()
    assert validate(tmp_path / "a.zarr", deep=True) == []

"""`vitsee extract --grams`: Gram matrices within slabs, against loops over the same store's
activations, whichever way they were made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.extractions import (
    RESNET,
    VIT,
    array_bytes,
    extract,
    extracted,
    plant_bright,
    plant_images,
)
from tests.manifests import edited
from vitsee_core.extraction import run, slab_grams
from vitsee_core.extraction.buffers import as_block
from vitsee_core.extraction.slab_grams import (
    FILE,
    FORWARD,
    MEMORY,
    GramProducts,
    GramStrategy,
    choose_strategy,
)
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table
from vitsee_stores import Store, open_store, validate
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import SiteSpec, StorePlan, n_bytes

N, SLAB, BAD = 10, 4, "class0/004.png"
SITES = [
    "--sites",
    "embed",
    "--sites",
    "blocks.0.*",
    "--sites",
    "blocks.1.in",
    "--sites",
    "head",
]
SMALL = ["--attention", "none", "--no-residual"]
MIXER = ["mixer_s32_224", "--random-init", "0", "--img-size", "64"]
CAIT = [
    "cait_xxs24_224",
    "--random-init",
    "0",
    "--img-size",
    "64",
    "--model-arg",
    "depth=1",
]
# Of the mean diagonal: one sum of float32 products; features rounded once to float16.
SINGLE, HALF = 2e-6, 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N, damaged=BAD)


def options(folder: Path, path: Path, *more: object) -> list[object]:
    return [
        *VIT,
        "--data",
        folder,
        "-o",
        path,
        "--slab",
        SLAB,
        *SITES,
        *SMALL,
        "--grams",
        *more,
    ]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Activations and Gram matrices; these come from the slab buffers."""
    path = tmp_path_factory.mktemp("whole") / "whole.zarr"
    said = extracted(*options(folder, path, "--batch-size", 3, "--codec", "zstd")).stderr
    assert "from the slab buffers" in said
    return path


def oracle(store: Store, site: str) -> NDArray[np.float64]:
    """(slabs, S, S) by loops over images in float64, from the store's own activations."""
    plan = store.plan
    out = np.full((plan.n_slabs, plan.slab, plan.slab), np.nan)
    for k in range(plan.n_slabs):
        rows = plan.rows(k)
        x = store.acts(site)[rows].astype(np.float64).reshape(rows.stop - rows.start, -1)
        valid = np.flatnonzero(store.valid[rows])
        mean = sum(x[i] for i in valid) / max(1, len(valid))
        for i in valid:
            for j in valid:
                out[k, i, j] = np.sum((x[i] - mean) * (x[j] - mean))
    return out


def check(store: Store, source: Store, tolerance: float) -> list[SiteSpec]:
    """Every Gram matrix of `store` against activations of `source`."""
    sites = list(store.plan.gram_sites)
    for site in sites:
        found, wanted = np.asarray(store.grams(site.name)), oracle(source, site.name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(
            np.isnan(found), np.isnan(wanted), err_msg=site.name
        )
        scale = np.nanmean(np.diagonal(wanted, axis1=1, axis2=2))
        error = np.nanmax(np.abs(found - wanted))
        assert error <= tolerance * scale + 1e-12, f"{site.name}: {error} of {scale}"
        np.testing.assert_array_equal(found, found.transpose(0, 2, 1), err_msg=site.name)
    return sites


# against loops --------------------------------------------------------------------------------


def test_every_site_against_loops(whole: Path) -> None:
    store = open_store(whole)
    sites = check(store, store, SINGLE)
    assert {site.name for site in sites} >= {
        "embed",
        "blocks.0.out",
        "blocks.0.mlp.hidden",
    }
    assert {site.kind for site in sites} == {"tokens"}  # the logits have none
    assert validate(whole, deep=True) == []
    row = list(store.samples.id).index(BAD)
    block = store.grams("embed")[row // SLAB]
    assert np.isnan(block[row % SLAB]).all()
    assert np.isnan(block[:, row % SLAB]).all()
    assert np.isnan(store.grams("embed")[2, 2:]).all()  # 10 images: the last slab has 2


@pytest.mark.slow
@pytest.mark.parametrize(("where", "batch"), [("forward", 4), ("memory", 3), ("file", 3)])
def test_pooled_stores_by_every_way(
    where: str,
    batch: int,
    folder: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "file":
        monkeypatch.setattr(slab_grams, "memory_bytes", lambda: 1000)
    path = tmp_path / "pooled.zarr"
    pooled = ["--tokens", "pooled", "--batch-size", batch]
    said = extracted(*options(folder, path, *pooled)).stderr
    phrase = {
        "forward": "one forward pass",
        "memory": "host memory",
        "file": "scratch file of",
    }
    assert phrase[where] in said.split("Gram matrices of")[1].splitlines()[0]
    assert "grams" in said.splitlines()[-1]  # its seconds
    store = open_store(path)
    check(store, open_store(whole), HALF)
    assert not (path / "acts").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pooled.zarr"]
    assert validate(path, deep=True) == []


@pytest.mark.slow
def test_memory_and_file_give_the_same_bytes_as_do_shards_and_resuming(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_into(name: str, *more: object) -> Path:
        path = tmp_path / name
        extracted(*options(folder, path, "--tokens", "pooled", "--batch-size", 3, *more))
        return path

    memory = run_into("memory.zarr")
    before = array_bytes(memory)
    for file in (*memory.glob("grams/*/all/c.1.*"), memory / "commits" / "c.1.0"):
        file.unlink()
    run_into("memory.zarr")
    assert array_bytes(memory) == before
    run_into("shards.zarr", "--shard", "1/2")
    assert array_bytes(run_into("shards.zarr", "--shard", "0/2")) == before
    monkeypatch.setattr(slab_grams, "memory_bytes", lambda: 1000)
    assert array_bytes(run_into("file.zarr")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sites", "kinds", "batch"),
    [
        (RESNET, ["stem", "layer1.0.*"], {"tokens"}, 4),
        (RESNET, ["stem", "layer1.0.*"], {"tokens"}, 2),
        (MIXER, ["blocks.0.token.hidden", "blocks.0.out"], {"rows", "tokens"}, 2),
        (CAIT, ["blocks.0.attn.proj_l"], {"raw"}, 2),
        (CAIT, ["blocks.0.attn.proj_l"], {"raw"}, 4),
    ],
)
def test_other_kinds_of_sites(
    model: list[str],
    sites: list[str],
    kinds: set[str],
    batch: int,
    folder: Path,
    tmp_path: Path,
) -> None:
    chosen = [part for site in sites for part in ("--sites", site)]
    path = tmp_path / "store.zarr"
    given = [
        *model,
        "--data",
        folder,
        "-o",
        path,
        "--slab",
        4,
        "--images",
        6,
        "--batch-size",
    ]
    extracted(*given, batch, *chosen, "--grams", "--dtype", "float32")
    store = open_store(path)
    assert {site.kind for site in check(store, store, SINGLE)} == kinds


@pytest.mark.slow
def test_a_slab_of_one_image_and_one_without_any(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ones.zarr"
    extracted(
        *VIT, "--data", folder, "-o", path, "--slab", 1, "--grams", "--sites", "embed"
    )
    store = open_store(path)
    values = np.asarray(store.grams("embed")).ravel()
    np.testing.assert_array_equal(values, np.where(store.valid, 0, np.nan))
    assert validate(path, deep=True) == []


# products -------------------------------------------------------------------------------------


def test_products_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0], [5.0, 0.0]])  # valid mean: 3, 2
    valid = torch.tensor([True, False, True, True])
    gram = GramProducts(torch.device("cpu")).gram([x], valid)
    assert gram.tolist() == [[4, 0, -4], [0, 4, -4], [-4, -4, 8]]
    block = as_block(gram.numpy(), valid.numpy(), 5)
    assert np.isnan(block[[1, 4]]).all()
    assert np.isnan(block[:, [1, 4]]).all()
    assert block[2].tolist()[::2][:2] == [0, 4]


def test_chunks_parts_layout_offset_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A common offset of 300 standard deviations, in pieces of 8 columns, seen channels last."""
    rng = torch.Generator().manual_seed(0)
    body = torch.randn(12, 7, 3, 5, generator=rng) + 300
    prefix = torch.randn(12, 2, 7, generator=rng) + 300
    valid = torch.arange(12) != 4
    x = torch.cat([prefix.flatten(1), body.flatten(1)], 1).double()[valid]
    x -= x.mean(0)
    wanted = (x @ x.T).numpy()
    monkeypatch.setitem(slab_grams.CHUNK_BYTES, "cpu", 8 * 11 * 4)
    products = GramProducts(torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        for seen in (body, body.permute(0, 2, 3, 1)):
            found = products.gram([prefix, seen], valid).numpy()
            np.testing.assert_allclose(
                found, wanted, rtol=0, atol=1e-4 * wanted.diagonal().mean()
            )
            np.testing.assert_array_equal(found, found.T)


# which way ------------------------------------------------------------------------------------


def test_the_way_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    table, cpu = site_table(model), torch.device("cpu")

    def way(
        slab: int, batch: int | None, memory: float, tokens: str = "pooled"
    ) -> GramStrategy:
        monkeypatch.setattr(slab_grams, "memory_bytes", lambda: int(memory))
        sites = tuple(dataclasses.replace(site, tokens=tokens) for site in table.sites)
        plan = StorePlan(4 * slab, slab, "none", sites, grams=True)
        return choose_strategy(plan, table, cpu, batch, 32)

    assert way(32, None, 1e12) == GramStrategy(
        32, FORWARD
    )  # the default batch is the slab
    assert way(256, None, 1e12) == GramStrategy(256, FORWARD)
    assert way(256, None, 1e5).name == "file"  # no room for 256 images at once
    assert way(256, 256, 1e5) == GramStrategy(256, FORWARD)  # as asked
    large = way(256, 32, 1e12)
    assert large.name == MEMORY
    size = large.set_bytes
    assert large == GramStrategy(32, MEMORY, 2, size)
    assert way(256, 32, 4 * 2.0 * size) == GramStrategy(32, MEMORY, 1, size)
    short = way(256, 32, 4 * 0.9 * size)
    assert short == GramStrategy(32, FILE, 1, size)
    assert (short.scratch_bytes, large.scratch_bytes) == (size, 0)
    assert way(256, None, 1e5, "all") == GramStrategy(
        32, MEMORY, 2, 0
    )  # the buffers are enough
    plain = StorePlan(512, 256, "none", table.sites)
    assert choose_strategy(plain, table, cpu, None, 32) == GramStrategy(32)


@pytest.mark.slow
def test_a_disk_without_room_for_the_scratch_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.zarr"
    command = options(folder, path, "--tokens", "pooled", "--batch-size", 3)
    monkeypatch.setattr(slab_grams, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(run, "max_disk_bytes", lambda manifest, block: 5000)
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: 6000)
    result = extract(*command)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "--grams needs a scratch file of" in result.stderr
    assert "1.0 kB free; choose --batch-size 4" in result.stderr
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: 10**12)
    monkeypatch.setattr(slab_grams, "free_disk_bytes", lambda _path: 1000)  # gone since
    result = extract(*command)
    assert result.exit_code == 1
    assert "--grams needs a scratch file of" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["store.zarr"]


@pytest.mark.slow
@pytest.mark.slow
def test_what_does_not_fit_the_held_type_stops_the_run_and_whole_slabs_go_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "late.zarr"
    command = [*plant_bright(tmp_path), *SMALL, "-o", path, "--sites", "embed", "--grams"]
    result = extract(*command, "--tokens", "pooled", "--batch-size", 2)
    assert result.exit_code == 1
    assert "--dtype embed=float32, or go on with whole slabs" in result.stderr
    assert "RuntimeWarning" not in result.stderr
    extracted(*command, "--batch-size", 4)
    assert np.asarray(open_store(path).grams("embed")).max() > 1e9


# the store ------------------------------------------------------------------------------------


def test_reading(whole: Path, folder: Path, tmp_path: Path) -> None:
    store = open_store(whole)
    lazy = store.grams("blocks.1.in")  # an alias of blocks.0.out
    assert repr(lazy) == "<LazyArray float32 (3, 4, 4)>"
    np.testing.assert_array_equal(lazy[:], store.grams("blocks.0.out")[:])
    slabs = list(store.slabs(images=9))
    np.testing.assert_array_equal(slabs[1].grams("embed"), store.grams("embed")[1])
    assert slabs[2].grams("embed").shape == (1, 1)
    with pytest.raises(MissingInput, match=r"logits is a vector, kept whole"):
        store.grams("logits")
    plain = tmp_path / "plain.zarr"
    extracted(*VIT, "--data", folder, "-o", plain, "--sites", "embed", *SMALL)
    with pytest.raises(
        MissingInput, match=r"plain has no Gram matrices of embed.*--grams"
    ):
        open_store(plain).grams("embed")


@pytest.mark.slow
@pytest.mark.slow
def test_joining(whole: Path, folder: Path, tmp_path: Path) -> None:
    before = array_bytes(whole)
    result = extract(*options(folder, whole)[:-1], "--no-grams")
    assert result.exit_code == 1
    assert "grams is true, given false" in result.stderr
    assert array_bytes(whole) == before
    assert "is complete" in extracted(*VIT, "--data", folder, "-o", whole).stderr
    old = tmp_path / "old.zarr"  # as a writer that knows no Gram matrices makes it
    command = [*VIT, "--data", folder, "-o", old, "--sites", "embed", *SMALL]
    extracted(*command)
    with edited(old) as manifest:
        assert manifest["plan"].pop("grams") is False
    assert open_store(old).plan.grams is False
    assert "is complete" in extracted(*command, "--no-grams").stderr
    result = extract(*command, "--grams")
    assert result.exit_code == 1
    assert "grams is false, given true" in result.stderr


@pytest.mark.slow
def test_dry_run_and_info(whole: Path, folder: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from vitsee_cli.main import main

    lines = extracted(
        *options(folder, tmp_path / "no.zarr"), "--dry-run", "-v"
    ).stdout.splitlines()
    rows = {line.split(",")[0]: line.split(",")[1:] for line in lines}
    assert rows["grams/embed/all"][:3] == ["3x4x4", "float32", str(3 * (4 * 4 * 4 + 4))]
    assert not any(
        name.startswith(("grams/logits", "grams/blocks.1.in")) for name in rows
    )
    sites = open_store(whole).plan.gram_sites
    said = CliRunner().invoke(main, ["info", str(whole)]).stdout
    assert f"grams      {len(sites)} sites, within slabs of 4 images" in said
    named = CliRunner().invoke(main, ["info", str(whole), "-f", "grams"]).stdout
    assert json.loads(named) == [site.name for site in sites]


def test_the_bytes_of_a_slab_count_its_gram_matrices() -> None:
    from vitsee_core.extraction.plan import slab_bytes

    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    plan = StorePlan(64, 32, "none", site_table(model).sites)
    more = dataclasses.replace(plan, grams=True)
    per_slab = len(more.gram_sites) * 32 * 32 * 4
    assert slab_bytes(more) - slab_bytes(plan) == per_slab
    on_disk = sum(n_bytes(more).values()) - sum(n_bytes(plan).values())
    # each chunk ends with its checksum, which `checksums` keeps a second time
    assert on_disk == 2 * (per_slab + (4 + 4) * len(more.gram_sites))

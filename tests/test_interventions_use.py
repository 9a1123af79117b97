"""Interventions as part of a store: its identity, its independence of how it was made, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import vitsee
from tests.extractions import VIT, array_bytes, extract, extracted, plant_images
from vitsee_cli.main import main
from vitsee_core.extraction.identity import fixed_identity
from vitsee_core.extraction.options import DataOptions, options_in_name
from vitsee_core.extraction.prepare import chosen_images
from vitsee_core.features.compared import model_key, require_comparable
from vitsee_core.models.intervention_spec import InterventionError, parse, placed
from vitsee_core.models.interventions import replacements
from vitsee_core.models.interventions.replacements import cycle
from vitsee_core.models.interventions.switching import Switch
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import model_of
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores import open_store
from vitsee_stores.errors import StoreMismatch, VitseeError
from vitsee_stores.weights_names import weights_name

N = 6
SITES = [
    "--sites",
    "blocks.0..1.out",
    "--attention",
    "none",
    "--no-residual",
    "--slab",
    3,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.zarr"
    extracted(*VIT, "--data", folder, "-o", path, *SITES)
    return path


def three(base: Path) -> list[str]:
    """A change by each kind of random number."""
    return [
        *("--replace", f"cls@blocks.0.out=noise:{base}"),
        *("--replace", f"random:2@blocks.0.out=shuffle:{base}"),
        *("--replace", f"outliers:1@blocks.1.out=mean:{base}"),
    ]


@pytest.mark.slow
def test_it_does_not_depend_on_how_it_is_made(
    base: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = [*VIT, "--data", folder, *SITES[:-2], *three(base)]
    given = [*bare, "--slab", 3]
    extracted(*given, "-o", tmp_path / "a.zarr")
    whole = array_bytes(tmp_path / "a.zarr")
    # by two shards, of which one joins a store that is there; with nothing read ahead
    monkeypatch.setattr(replacements, "HELD_SHARE", 1 << 60)
    extracted(*given, "-o", tmp_path / "b.zarr", "--shard", "1/2")
    extracted(*given, "-o", tmp_path / "b.zarr", "--shard", "0/2")
    assert array_bytes(tmp_path / "b.zarr") == whole
    extracted(*bare, "-o", tmp_path / "d.zarr", "--slab", N)
    monkeypatch.undo()
    extracted(*bare, "-o", tmp_path / "e.zarr", "--slab", N)
    assert array_bytes(tmp_path / "d.zarr") == array_bytes(tmp_path / "e.zarr")
    # The values put there are equal in other batches and slabs, whatever the roundings of others.
    extracted(*bare, "--slab", 4, "-o", tmp_path / "c.zarr", "--batch-size", 1)
    found = [
        np.asarray(open_store(tmp_path / f"{x}.zarr").acts("blocks.0.out")) for x in "ac"
    ]
    np.testing.assert_array_equal(found[0][:, 0], found[1][:, 0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-2)


@pytest.mark.slow
def test_a_store_says_what_was_changed(base: Path, folder: Path, tmp_path: Path) -> None:
    path, plain = tmp_path / "a.zarr", open_store(base)
    given = [*VIT, "--data", folder, *SITES, "-o", path, "--ablate-heads", "last:1"]
    result = extracted(*given, "--replace", f"cls@blocks.0..1.out=mean:{base}")
    lines = ["cls=mean at blocks.0-1.out", "heads 1=zero at blocks.5"]
    assert f"the model runs with {lines[0]}" in result.stderr
    assert "zero alone overstates" in result.stderr
    store = open_store(path)
    assert (
        store.manifest.identity["interventions"] == store.model["interventions"] == lines
    )
    assert store.manifest.identity["reference_stores"] == [plain.manifest.store_id]
    assert not {"interventions", "reference_stores"} & {*plain.manifest.identity}
    assert weights_name(store.model) == f"random 0, {', '.join(lines)}"
    assert "changed" in CliRunner().invoke(main, ["info", str(path)]).stdout
    (record,) = describe_run([store], command=(), parameters={})["stores"]
    assert record["interventions"] == lines
    mean = np.asarray(plain.acts("blocks.0.out"), np.float64)[:, 0].mean(0)
    np.testing.assert_allclose(
        store.acts("blocks.0.out")[:, 0], np.tile(mean, (N, 1)), atol=1e-2
    )
    # Whoever joins says the same, or is refused.
    assert "nothing to do" in extracted(*given, "--replace", three_of(base)).stderr
    for more in ([], ["--replace", f"cls@blocks.0.out=mean:{base}"]):
        assert "interventions is" in extract(*given, *more).stderr
    assert "interventions is" in extract(*given[:-2]).stderr
    assert model_key(store) != model_key(plain)
    with pytest.raises(StoreMismatch, match="different interventions"):
        require_comparable(store, [plain])
    with pytest.raises(VitseeError, match="nothing is recomputed of a changed model"):
        model_of(store)


def three_of(base: Path) -> str:
    """The same sites in other words, the store by another path."""
    return f"cls@blocks.[01].out=mean:{base.parent}/./{base.name}"


@pytest.mark.slow
def test_extract_in_python(base: Path, folder: Path, tmp_path: Path) -> None:
    import timm

    options: dict[str, Any] = {
        "sites": "blocks.0.out",
        "attention": "none",
        "residual": False,
    }
    named = "test_vit?random-init=0&img-size=32x48&model-arg=patch_size=8"
    text = f"cls@blocks.0.out=mean:{base}"
    a = vitsee.extract(f"{named}&replace={text}", folder, tmp_path / "a.zarr", **options)
    b = vitsee.extract(named, folder, tmp_path / "b.zarr", replace=text, **options)
    assert array_bytes(a.path) == array_bytes(b.path)
    assert a.manifest.identity == b.manifest.identity
    torch.manual_seed(0)
    own = timm.create_model("test_vit", img_size=(32, 48), patch_size=8)
    options["ablate_heads"] = "blocks.0:0"
    for _ in range(2):  # the hooks are gone after a run
        c = vitsee.extract(own, folder, tmp_path / "c.zarr", force=True, **options)
        assert c.manifest.identity["interventions"] == ["heads 0=zero at blocks.0"]


@pytest.mark.slow
def test_sites_and_dry_run_say_it(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    name = "test_vit?replace=cls@last=zero&block-attention=own@blocks.1"
    result = runner.invoke(main, ["sites", name, "--sites", "head"])
    assert "extract runs the model with cls=zero at blocks.5.out" in result.stderr
    assert "no own at blocks.1" in result.stderr
    result = extract(*VIT, "--replace", "cls@last=zero", "--data", folder, "-o",
                     tmp_path / "x.zarr", "--dry-run")  # fmt: skip
    assert "the model runs with cls=zero at blocks.5.out" in result.stderr
    assert not (tmp_path / "x.zarr").exists()


def test_options_in_a_name() -> None:
    name, found = options_in_name(
        "vit?replace=cls@last=zero&ablate-heads=blocks.1:0,1=zero"
    )
    assert name == "vit" and found["replace"] == ("cls@last=zero",)
    assert found["ablate_heads"] == ("blocks.1:0,1=zero",)


def test_stores_by_absolute_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    same = ("cls@last=zero", "cls@last=noise:s3://b/a.zarr")
    found = placed(("cls@last=mean:a.zarr", "1:10@last=random:a.zarr", *same))
    places = (f"cls@last=mean:{tmp_path}/a.zarr", f"1:10@last=random:{tmp_path}/a.zarr")
    assert found == (*places, *same)


def test_a_cycle() -> None:
    valid = np.array([1, 0, 1, 1, 1, 0], bool)
    partners = cycle(valid, 3)
    rows = np.flatnonzero(valid)
    assert sorted(partners[rows]) == rows.tolist() and (partners[rows] != rows).all()
    seen, row = set[int](), 0
    while row not in seen:
        seen.add(row)
        row = int(partners[row])
    assert seen == {*rows.tolist()}
    assert valid[partners].all()


# refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"replace": ["cls=zero"]}, "--replace 'cls=zero'; expected TOKENS@SITES=VALUES"),
        ({"replace": ["cls@last"]}, "expected the values zero, mean:STORE"),
        ({"replace": ["cls@last=mean"]}, "expected the values zero, mean:STORE"),
        ({"replace": ["cls@last=zero:a.zarr"]}, "expected the values zero"),
        ({"replace": ["cls,@last=zero"]}, "expected TOKENS@SITES=VALUES"),
        ({"replace": ["outliers@last=zero"]}, "outliers:N or random:N alone"),
        ({"replace": ["outliers:0@last=zero"]}, "outliers:N or random:N alone"),
        ({"replace": ["cls,outliers:2@last=zero"]}, "outliers:N or random:N alone"),
        ({"ablate_heads": ["blocks.3"]}, "expected BLOCK:HEAD,HEAD"),
        ({"ablate_heads": ["blocks.3:a"]}, "expected BLOCK:HEAD,HEAD"),
        ({"ablate_heads": ["blocks.3:0=half"]}, "expected the values zero"),
        ({"block_attention": ["cls<-patches"]}, "expected QUERIES<-KEYS@BLOCKS"),
        ({"block_attention": ["near@blocks.1"]}, "own@BLOCKS or distance>K@BLOCKS"),
        ({"block_attention": ["distance>far@blocks.1"]}, "distance>K@BLOCKS"),
    ],
)
def test_malformed(options: dict[str, list[str]], phrase: str) -> None:
    with pytest.raises(InterventionError) as caught:
        parse(**options)
    assert phrase in str(caught.value) and "\n" not in str(caught.value)


def test_malformed_on_the_command_line(tmp_path: Path) -> None:
    result = extract(
        "demo:vit", "--data", "demo:test", "-o", tmp_path / "x", "--replace", "cls"
    )
    assert result.exit_code == 2 and "expected TOKENS@SITES=VALUES" in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def table() -> SiteTable:
    return site_table(load_model("test_vit", random_init=0, img_size=(32, 48),
                                 model_args={"patch_size": 8}))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"replace": ["cls@blocks.9.out=zero"]}, "no site matches 'blocks.9.out'"),
        ({"replace": ["cls@blocks.3..1.out=zero"]}, "'blocks.3..1.out' is no range"),
        (
            {"replace": ["reg0@last=zero"]},
            "no tokens 'reg0'; there are prefix tokens cls and 4x6",
        ),
        ({"replace": ["registers@last=zero"]}, "no tokens 'registers'"),
        ({"replace": ["head@last=zero"]}, "no tokens 'head'"),
        (
            {"replace": ["outliers:25@last=zero"]},
            "outliers:25, and there are 4x6 patches",
        ),
        ({"replace": ["cls@logits=zero"]}, "logits is a vector, without tokens"),
        ({"ablate_heads": ["blocks.1:2"]}, "blocks.1 has the heads 0 to 1, not 2"),
        (
            {"ablate_heads": ["blocks.9:0"]},
            "has no such block with token-to-token attention",
        ),
        (
            {"block_attention": ["cls<-all@blocks.5"]},
            "cls would be left without any token",
        ),
        ({"block_attention": ["dist<-cls@last"]}, "no tokens 'dist'"),
        ({"block_attention": ["own@norm"]}, "has no such block"),
    ],
)
def test_what_the_model_lacks(
    table: SiteTable, options: dict[str, list[str]], phrase: str
) -> None:
    with pytest.raises(VitseeError) as caught:
        Switch("test_vit", table, parse(**options)).lines()
    assert phrase in str(caught.value) and "\n" not in str(caught.value)
    assert next(iter(options.values()))[0].split("=")[0].split("@")[-1] in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("change", "kind", "phrase"),
    [
        ({"model": {"architecture": "other"}}, "mean", "has another model"),
        ({"weights": "0" * 64}, "noise", "has other weights (random 0)"),
        ({"ablate_skip": ["blocks.0.attn"]}, "mean", "has other skip connections"),
        (
            {"interventions": ["cls=zero at blocks.0.out"]},
            "mean",
            "has interventions of its own",
        ),
        ({"transform": {}}, "mean", "has another transform"),
        (
            {"samples_fingerprint": "0" * 64},
            "shuffle",
            "has other images, or the same in another",
        ),
    ],
)
def test_base_stores_of_something_else(
    base: Path, change: dict[str, Any], kind: str, phrase: str
) -> None:
    store = open_store(base)
    identity = dict(store.manifest.identity)
    replacements.check_base(store, identity, kind, "--replace x")
    if kind == "shuffle":  # of mean and noise the images may be others
        replacements.check_base(store, {**identity, **change}, "mean", "--replace x")
    own = dataclasses.replace(store.manifest, identity={**identity, **change})
    store.manifest = own
    with pytest.raises(VitseeError) as caught:
        replacements.check_base(store, identity, kind, "--replace x")
    assert phrase in str(caught.value) and "--replace x: base has" in str(caught.value)


@pytest.mark.slow
def test_base_stores_that_lack_something(
    base: Path, folder: Path, tmp_path: Path, table: SiteTable
) -> None:
    pooled, one = tmp_path / "pooled.zarr", tmp_path / "one.zarr"
    extracted(*VIT, "--data", folder, "-o", pooled, *SITES, "--tokens", "pooled")
    extracted(*VIT, "--data", folder, "-o", one, *SITES, "--images", 1)
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    cases = [
        (1, f"cls@blocks.0.out=mean:{tmp_path}/none.zarr", "none.zarr"),
        (N, f"cls@blocks.3.out=mean:{base}", "extract adds it with --sites"),
        (N, f"cls@blocks.0.out=mean:{pooled}", "keeps blocks.0.out pooled only"),
        (
            1,
            f"cls@blocks.0.out=shuffle:{one}",
            "another image's tokens, and there is one image",
        ),
        (
            1,
            f"cls@blocks.0.out=shuffle:{base}",
            "other images, or the same in another order",
        ),
    ]
    for images, text, phrase in cases:
        identity = fixed_identity(
            model, chosen_images(DataOptions(str(folder), images=images), {})
        )
        switch = Switch("test_vit", table, parse([text]), identity)
        with pytest.raises(VitseeError) as caught:
            switch.changes(model.module)
        assert phrase in str(caught.value) and "\n" not in str(caught.value)


def test_what_excludes_each_other(folder: Path, tmp_path: Path) -> None:
    given = [
        *VIT,
        "--data",
        folder,
        "-o",
        tmp_path / "x.zarr",
        "--replace",
        "cls@last=zero",
    ]
    assert (
        "--erf is not supported with cls@last=zero" in extract(*given, "--erf", 2).stderr
    )
    assert not (tmp_path / "x.zarr").exists()

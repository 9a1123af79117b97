"""`--ablate-skip`: forward passes without a skip, against passes written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.every_command import vitsee
from tests.extractions import RESNET, VIT, array_bytes, extract, extracted, plant_images
from tests.models_helpers import SMALL, images, small
from tests.models_helpers import VIT as TINY
from vitsee_core.models import lasting_changes
from vitsee_core.models.hook_points import BranchOnly, ModelError, branch_only
from vitsee_core.models.lasting_changes import ablate_skips
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import model_of
from vitsee_core.models.selfcheck import self_check
from vitsee_core.models.site_tables import site_table
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores import Store, open_store, validate

N = 5
EVERYTHING = [
    "--sites",
    "blocks",
    "--sites",
    "residual",
    "--sites",
    "head",
    "--dtype",
    "float32",
]
# Float32 sums of a hundred terms in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


def options(model: list[str], folder: Path, path: Path, *more: object) -> list[object]:
    return [*model, "--data", folder, "-o", path, *EVERYTHING, "--inputs", *more]


def same(store: Store, site: str, wanted: Tensor) -> None:
    found = np.asarray(store.acts(site))
    np.testing.assert_allclose(found, wanted.flatten(2).numpy(), **CLOSE, err_msg=site)


def pixels(store: Store) -> Tensor:
    return torch.from_numpy(np.asarray(store.inputs()))


# forward passes by hand -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut_vit(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut") / "cut.zarr"
    extracted(
        *options(
            VIT,
            folder,
            path,
            "--ablate-skip",
            "blocks.1",
            "--ablate-skip",
            "blocks.3.mlp",
        )
    )
    return path


@torch.no_grad()
def test_vit_by_hand(cut_vit: Path) -> None:
    store = open_store(cut_vit)
    model: Any = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    ).module
    x = model.norm_pre(model._pos_embed(model.patch_embed(pixels(store))))
    for i, block in enumerate(model.blocks):
        f = block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        mid = f if i == 1 else x + f
        same(store, f"blocks.{i}.attn.branch", f)
        same(store, f"blocks.{i}.mid", mid)
        g = block.drop_path2(block.ls2(block.mlp(block.norm2(mid))))
        same(store, f"blocks.{i}.mlp.branch", g)
        # z and f as they pass, whether or not z is added
        for name, z, branch in (("attn", x, f), ("mlp", mid, g)):
            products = torch.stack(
                [(z * z).sum(-1), (branch * branch).sum(-1), (z * branch).sum(-1)], -1
            )
            found = np.asarray(store.residual(f"blocks.{i}.{name}"))
            np.testing.assert_allclose(found, products.numpy(), rtol=1e-3, atol=1e-3)
        x = g if i in (1, 3) else mid + g
        same(store, f"blocks.{i}.out", x)
    logits = model.forward_head(model.norm(x))
    np.testing.assert_allclose(
        np.asarray(store.vectors("logits")), logits.numpy(), **CLOSE
    )


def test_the_sum_is_the_branch_to_the_bit(cut_vit: Path) -> None:
    sites = open_store(cut_vit).sites
    assert sites["blocks.1.mid"].alias_of == "blocks.1.attn.branch"
    assert sites["blocks.1.mlp.branch"].alias_of == "blocks.1.out"
    assert sites["blocks.3.mlp.branch"].alias_of == "blocks.3.out"
    assert sites["blocks.3.mid"].alias_of is None
    assert validate(cut_vit, deep=True) == []


@pytest.mark.slow
def test_nothing_before_the_cut_changes(
    cut_vit: Path, folder: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.zarr"
    extracted(*options(VIT, folder, plain))
    a, b = array_bytes(plain), array_bytes(cut_vit)
    for path in a:
        if path.startswith(
            ("acts/embed", "acts/blocks.0.", "input", "residual/blocks.0.")
        ):
            assert a[path] == b[path], path
    assert a["acts/blocks.1.out/grid/c.0.0.0.0"] != b["acts/blocks.1.out/grid/c.0.0.0.0"]
    assert "attention/rollout/c.0.0" in a
    assert "attention/rollout/c.0.0" not in b
    assert (
        "blocks.1.attn works without" in open_store(cut_vit).manifest.left_out["rollout"]
    )


@torch.no_grad()
def test_resnet_by_hand(folder: Path, tmp_path: Path) -> None:
    """One block with a projection in its shortcut, one without."""
    path = tmp_path / "cut.zarr"
    cut = ["layer1.0", "layer2.0"]
    extracted(
        *options(RESNET, folder, path, "--ablate-skip", cut[0], "--ablate-skip", cut[1])
    )
    store = open_store(path)
    model: Any = load_model("test_resnet", random_init=0, img_size=(64, 64)).module
    x = model.maxpool(model.act1(model.bn1(model.conv1(pixels(store)))))
    for name in ("layer1", "layer2", "layer3", "layer4"):
        for i, block in enumerate(getattr(model, name)):
            f, last = x, 3 if hasattr(block, "conv3") else 2
            for k in range(1, last + 1):
                f = getattr(block, f"bn{k}")(getattr(block, f"conv{k}")(f))
                f = torch.relu(f) if k < last else f
            skip = x if block.downsample is None else block.downsample(x)
            x = torch.relu(f if f"{name}.{i}" in cut else f + skip)
            wanted = x.flatten(2).transpose(1, 2)
            same(store, f"{name}.{i}.out", wanted)
    assert store.manifest.identity["ablate_skip"] == cut


@pytest.mark.slow
@torch.no_grad()
def test_a_drop_path_that_two_branches_share() -> None:
    """Mixer: one module ends both sublayers, told apart by its calls; every pass anew."""
    model = small("mixer_s32_224", 64)
    x = images(model)
    ablate_skips(model, ["blocks.1.channel"])
    module: Any = model.module
    y = module.stem(x)
    for i, block in enumerate(module.blocks):
        mid = y + block.mlp_tokens(block.norm1(y).transpose(1, 2)).transpose(1, 2)
        g = block.mlp_channels(block.norm2(mid))
        y = g if i == 1 else mid + g
    for _ in range(2):
        torch.testing.assert_close(
            module(x), module.forward_head(module.norm(y)), **CLOSE
        )


ANY = [
    ("deit3_small_patch16_224", 32, TINY, "blocks.1"),
    ("cait_xxs24_224", 32, SMALL | {"patch_size": 8, "num_heads": 4}, "blocks.1.attn"),
    ("beit_base_patch16_224", 32, TINY, "blocks.*.mlp"),
    ("resnetv2_50", 64, {"layers": [1, 1, 1, 1]}, "stages.0.blocks.0"),
    ("seresnet18", 64, {}, "layer1.1"),
    ("swin_tiny_patch4_window7_224", 56, {"depths": [1, 1]}, "layers.0.blocks.0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "args", "cut"), ANY, ids=[a[0] for a in ANY])
def test_structures_without_their_names(
    name: str, size: int, args: Any, cut: str
) -> None:
    model = small(name, size, **args)
    x = images(model, 2)
    before = model.module(x)
    ablate_skips(model, [cut])
    table = site_table(model)
    gone = {n for n, residual in table.residuals.items() if residual.ablated}
    assert gone == set(model.ablate_skip)
    assert gone
    stored = [site for site in table.sites if site.alias_of is None]
    check = self_check(model, table, x, sites=stored, attention=table.attention)
    assert check.ok, check.failures
    assert check.figures["sums"]["n"] >= len(gone)
    assert not torch.equal(model.module(x), before)
    assert type(model.module(x)) is Tensor


# what is refused ------------------------------------------------------------------------------


def refused(*args: object) -> str:
    result = extract(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr


@pytest.mark.slow
def test_names_that_do_not_exist(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "no.zarr"
    for name in ("blocks.9", "blocks", "all", "blocks.1.token", "layer1.0"):
        said = refused(*options(VIT, folder, path, "--ablate-skip", name))
        assert f"--ablate-skip {name}: test_vit has no residual block or sublayer" in said
        assert "blocks.0.attn" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_structures_that_are_not_known() -> None:
    added = (
        r"--ablate-skip blocks.0 cannot be done .*: what it adds is no module's output"
    )
    none = r"--ablate-skip blocks.0: mobileone_s1 has no block whose branches are known"
    for name, args, said in (
        ("vit_base_patch16_18x2_224", TINY, added),
        ("mobileone_s1", {}, none),
    ):
        model = small(name, 32, **args)
        with pytest.raises(ModelError, match=said):
            ablate_skips(model, ["blocks.0"])
        assert model.ablate_skip == ()


def test_a_skip_that_stays_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("vit_tiny_patch16_224", 32, **TINY)
    x = images(model)
    before = model.module(x)
    monkeypatch.setattr(lasting_changes, "branch_only", lambda f: f)
    with pytest.raises(
        ModelError, match=r"blocks.0.attn cannot be done .* is not blocks.0"
    ):
        ablate_skips(model, ["blocks.0"])
    assert not model.ablate_skip
    monkeypatch.undo()
    assert torch.equal(model.module(x), before)
    assert not any(residual.ablated for residual in site_table(model).residuals.values())
    ablate_skips(model, ["blocks.-1.mlp"])
    assert list(model.ablate_skip) == ["blocks.2.mlp"]


@pytest.mark.slow
def test_identity(cut_vit: Path, folder: Path) -> None:
    before = array_bytes(cut_vit)
    for more in ([], ["--ablate-skip", "blocks.1"]):
        said = refused(*VIT, "--data", folder, "-o", cut_vit, *more)
        assert 'ablate_skip is ["blocks.1.attn", "blocks.1.mlp", "blocks.3.mlp"]' in said
    again = ["--ablate-skip", "blocks.3.mlp", "--ablate-skip", "blocks.1"]
    assert (
        "is complete" in extracted(*VIT, "--data", folder, "-o", cut_vit, *again).stderr
    )
    assert array_bytes(cut_vit) == before


@pytest.mark.slow
def test_info_sidecar_and_the_model_again(
    cut_vit: Path, folder: Path, tmp_path: Path
) -> None:
    assert "no skip in blocks.1.attn, blocks.1.mlp, blocks.3.mlp" in vitsee(
        "info", cut_vit
    )
    store = open_store(cut_vit)
    names = ["blocks.1.attn", "blocks.1.mlp", "blocks.3.mlp"]
    record = describe_run([store], command=[], parameters={})
    assert record["stores"][0]["ablations"] == names
    with torch.no_grad():
        logits = model_of(store).module(pixels(store))
    np.testing.assert_allclose(
        np.asarray(store.vectors("logits")), logits.numpy(), **CLOSE
    )
    csv = tmp_path / "r.csv"
    vitsee("normratio", cut_vit, "-o", csv)
    sidecar = json.loads(csv.with_name("r.csv.json").read_text())
    assert sidecar["stores"][0]["ablations"] == names
    plain = tmp_path / "plain.zarr"
    extracted(*VIT, "--data", folder, "-o", plain, "--sites", "embed")
    assert "no skip" not in vitsee("info", plain)
    assert open_store(plain).manifest.identity["ablate_skip"] == []
    record = describe_run([open_store(plain)], command=[], parameters={})
    assert record["stores"][0]["ablations"] == []


# the tensor that stays alone ------------------------------------------------------------------


def test_sums_give_the_branch_itself() -> None:
    f, z = torch.randn(2, 3), torch.randn(2, 3)
    for total in (
        branch_only(f) + z,
        z + branch_only(f),
        torch.add(z, branch_only(f)),
        branch_only(f).add(z),
    ):
        assert total is f
    inplace: Tensor = branch_only(f)
    inplace += z
    assert inplace is f
    other = z
    other += branch_only(f)
    assert other is f


def test_everything_else_sees_the_plain_tensor() -> None:
    f, z = torch.randn(2, 3), torch.randn(2, 3)
    lonely = branch_only(f)
    for found, wanted in (
        (lonely * z, f * z),
        (lonely + 1, f + 1),
        (lonely + z[:1], f + z[:1]),
        (torch.add(lonely, z, alpha=2), f + 2 * z),
        (torch.cat([lonely, z]), torch.cat([f, z])),
        (nn.Identity()(lonely).transpose(0, 1), f.T),
    ):
        assert type(found) is Tensor
        assert torch.equal(found, wanted)
    assert isinstance(lonely, BranchOnly)
    assert torch.equal(lonely, f)


def test_gradients_and_types() -> None:
    f = torch.randn(2, 3, requires_grad=True)
    z = torch.randn(2, 3, requires_grad=True)
    (z + branch_only(2 * f)).sum().backward()
    assert f.grad is not None
    assert torch.equal(f.grad, torch.full((2, 3), 2.0))
    assert z.grad is None
    half = torch.randn(2, 3).bfloat16()
    total = torch.randn(2, 3) + branch_only(half)
    assert total.dtype == torch.float32
    assert torch.equal(total, half.float())

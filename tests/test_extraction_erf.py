"""`vitsee extract --erf`: fields against loops in float64, by hand, and what a user sees."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.extractions import RESNET, VIT, array_bytes, extract, extracted, plant_images
from tests.manifests import edited
from tests.models_helpers import images, small
from vitsee_cli.main import main
from vitsee_core.extraction.erf import ErfCost, ErfPasses, ErfSums
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_stores import Store, open_store, validate
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import SiteSpec

N, ERF, SLAB, BAD = 10, 6, 4, "class0/004.png"
SITES = ["--sites", "embed", "--sites", "blocks.0.*", "--sites", "head"]
SMALL = ["--attention", "none", "--no-residual"]
CPU = torch.device("cpu")
# Single precision through a few layers, relative to a field's largest value.
SINGLE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N, damaged=BAD)


def options(folder: Path, path: Path, *more: object) -> list[object]:
    return [*VIT, "--data", folder, "-o", path, *SITES, *SMALL, *more]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.zarr"
    # The unreadable image is to be among those of the fields.
    more = ["--slab", SLAB, "--erf", ERF, "--inputs", "--order", "dataset"]
    said = extracted(*options(folder, path, *more, "--batch-size", 3)).stderr
    assert (
        "receptive fields of 6 images at 12 sites: 36 backward passes over at most 3 "
        in said
    )
    assert "erf" in said.splitlines()[-2] + said.splitlines()[-1]  # its seconds
    return path


# against loops --------------------------------------------------------------------------------


def oracle(
    module: nn.Module,
    tap: tuple[str, bool],
    x: NDArray[np.float32],
    n_prefix: int | None,
    grid: tuple[int, int],
) -> NDArray[np.float64]:
    """(H, W): the field of one image in float64, cell by cell and channel by channel.

    tap: a module, and whether its input counts. n_prefix: None for channels first.
    """
    held: list[Tensor] = []
    name, entering = tap
    child = module.get_submodule(name)
    handle = (
        child.register_forward_pre_hook(lambda _m, args: held.append(args[0].clone()))
        if entering
        else child.register_forward_hook(lambda _m, _a, out: held.append(out.clone()))
    )
    leaf = torch.from_numpy(x).double()[None].requires_grad_(True)
    module(leaf.clone())
    handle.remove()
    rows = [grid[0] // 2] if grid[0] % 2 else [grid[0] // 2 - 1, grid[0] // 2]
    cols = [grid[1] // 2] if grid[1] % 2 else [grid[1] // 2 - 1, grid[1] // 2]
    scalar = torch.zeros((), dtype=torch.float64)
    for r in rows:
        for c in cols:
            if n_prefix is None:
                cell = held[0][0, :, r, c]
            else:
                cell = held[0][0, n_prefix + r * grid[1] + c]
            for channel in range(len(cell)):
                scalar = scalar + cell[channel] / (len(rows) * len(cols))
    (gradient,) = torch.autograd.grad(scalar, leaf)
    return np.asarray(gradient[0].abs().sum(0).numpy())


def summed(
    store: Store, module: nn.Module, site: str, tap: tuple[str, bool]
) -> NDArray[Any]:
    """(slabs, H, W) over the valid rows that count."""
    layout, plan = store.layout(site), store.plan
    assert layout is not None and layout.grid is not None and plan.erf is not None
    n_prefix = layout.n_prefix if VIT[0] in store.manifest.model["name"] else None
    out = np.zeros((plan.n_erf_slabs, *plan.erf.size))
    for i in range(plan.erf.n_images):
        if store.valid[i]:
            x = store.inputs()[i]
            out[i // plan.slab] += oracle(module, tap, x, n_prefix, layout.grid)
    return out


def near(found: Any, wanted: NDArray[Any]) -> None:
    np.testing.assert_allclose(
        np.asarray(found), wanted, rtol=0, atol=SINGLE * wanted.max()
    )


def test_vit_against_loops(whole: Path) -> None:
    store = open_store(whole)
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    module = model.module.double()
    taps = {
        "embed": ("blocks.0", True),
        "blocks.0.out": ("blocks.0", False),
        "blocks.0.mid": ("blocks.0.norm2", True),
        "blocks.0.attn.branch": ("blocks.0.drop_path1", False),
        "blocks.0.mlp.hidden": ("blocks.0.mlp.drop1", True),
    }
    for site, tap in taps.items():
        found = np.asarray(store.erf(site))
        assert found.shape == (2, 32, 48)
        assert found.dtype == np.float32
        near(found, summed(store, module, site, tap))
    assert np.asarray(store.erf_counts()).tolist() == [int(store.valid[:4].sum()), 2]
    assert not store.valid[:ERF].all()
    assert validate(whole, deep=True) == []


@pytest.mark.parametrize("size", ["64", "96x64"])
def test_resnet_against_loops(size: str, folder: Path, tmp_path: Path) -> None:
    """Modules that write over what passed by; 96x64: three rows and two columns at last."""
    path = tmp_path / "store.zarr"
    given = [*RESNET[:3], "--img-size", size, "--data", folder, "-o", path, "--images", 3]
    sites = ["--sites", "stem", "--sites", "layer1.0.*", "--sites", "layer4.0.out"]
    extracted(*given, *sites, "--erf", 2, "--inputs")
    store = open_store(path)
    module = load_model(
        "test_resnet",
        random_init=0,
        img_size=store.plan.erf.size,  # type: ignore[union-attr]
    ).module.double()  # type: ignore[union-attr]
    last = "bn3" if hasattr(module.layer1[0], "bn3") else "bn2"  # type: ignore[index,union-attr]
    for site, tap in (
        ("stem", ("layer1.0", True)),
        ("layer1.0.branch", (f"layer1.0.{last}", False)),
        ("layer1.0.out", ("layer1.0", False)),
        ("layer4.0.out", ("layer4.0", False)),
    ):
        near(store.erf(site), summed(store, module, site, tap))


# by hand --------------------------------------------------------------------------------------


class Boxes(nn.Module):
    """3 x 3 sums of the three colours, then of those: a field known by hand."""

    def __init__(self, constant: bool = False) -> None:
        super().__init__()
        sums = [
            nn.Conv2d(3, 1, 3, padding=1, bias=False),
            nn.Conv2d(1, 1, 3, padding=1, bias=False),
        ]
        self.blocks = nn.Sequential(
            *(nn.Sequential(conv, nn.Identity()) for conv in sums)
        )
        self.mask = nn.Threshold(1e9, 0.0) if constant else nn.Identity()
        for conv in sums:
            nn.init.ones_(conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(images, 1)."""
        return self.mask(self.blocks(x)).flatten(1).mean(1, keepdim=True)  # type: ignore[no-any-return]


def toy(
    module: nn.Module, size: tuple[int, int]
) -> tuple[LoadedModel, SiteTable, list[SiteSpec]]:
    module.eval().requires_grad_(False)
    model = LoadedModel("toy", module, (3, *size), {}, {}, "toy")
    table = site_table(model)
    sites = [s for s in table.sites if s.kind == "tokens" and s.alias_of is None]
    return model, table, sites


@pytest.mark.parametrize("size", [(9, 9), (8, 8), (9, 8)])
def test_two_box_filters_by_hand(size: tuple[int, int]) -> None:
    model, table, sites = toy(Boxes(), size)
    assert [site.name for site in sites][-2:] == ["blocks.0.out", "blocks.1.out"]
    fields = ErfPasses(model, table, sites, CPU).fields(images(model, 2))
    # along an even axis the mean of two neighbouring cells
    widths: dict[int, tuple[list[float], list[float]]] = {
        9: ([1, 1, 1], [1, 2, 3, 2, 1]),
        8: ([0.5, 1, 1, 0.5], [0.5, 1.5, 2.5, 2.5, 1.5, 0.5]),
    }
    for k in range(2):
        found = fields[f"blocks.{k}.out"]
        assert found is not None
        axes = []
        for length in size:
            profile = np.zeros(length)
            taps = widths[length][k]
            start = (length - len(taps)) // 2
            profile[start : start + len(taps)] = taps
            axes.append(profile)
        for of_image in found.numpy():
            np.testing.assert_allclose(of_image, 3 * np.outer(*axes), rtol=1e-6)


def test_sites_that_do_not_depend_on_the_input() -> None:
    class Positions(Boxes):
        """A module's output that is the same for every image."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            """As before, and nothing times the table."""
            added: Tensor = (
                super().forward(x) + 0 * self.table(torch.ones_like(x[:, :1])).mean()
            )
            return added

    model, table, sites = toy(Positions(), (9, 9))
    assert "table" in {site.name for site in sites}
    passes = ErfPasses(model, table, sites, CPU)
    cost = passes.probe(images(model, 2))
    assert cost.left_out == {"table": "does not depend on the input by gradient"}
    assert "table" not in passes.without(cost.left_out).names
    model, table, sites = toy(Boxes(constant=True), (9, 9))
    masked = ErfPasses(model, table, [table["mask"]], CPU).fields(images(model, 2))[
        "mask"
    ]
    assert masked is not None  # the gradient is there, and 0
    assert not masked.any()


# how it is worked off -------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_slabs_shards_and_resuming(
    whole: Path, folder: Path, tmp_path: Path
) -> None:
    def run(name: str, *more: object) -> Path:
        path = tmp_path / name
        extracted(
            *options(folder, path, "--erf", ERF, "--inputs", "--order", "dataset", *more)
        )
        return path

    store = open_store(whole)
    other = open_store(run("other.zarr", "--slab", 3, "--batch-size", 2))
    assert np.asarray(other.erf_counts()).sum() == np.asarray(store.erf_counts()).sum()
    for site in store.plan.erf.sites:  # type: ignore[union-attr]
        wanted = np.asarray(store.erf(site)).sum(0)
        np.testing.assert_allclose(
            np.asarray(other.erf(site)).sum(0), wanted, rtol=0, atol=1e-6 * wanted.max()
        )
    same = ["--slab", SLAB, "--batch-size", 3]
    shards = run("shards.zarr", *same, "--shard", "1/2")
    assert array_bytes(run("shards.zarr", *same, "--shard", "0/2")) == array_bytes(whole)
    for file in (*shards.glob("erf/*/c.1*"), shards / "commits" / "c.1.0"):
        file.unlink()
    assert (
        "receptive fields of 2 images"
        in extracted(*options(folder, shards, "--erf", ERF, "--batch-size", 3)).stderr
    )
    assert array_bytes(shards) == array_bytes(whole)


@pytest.mark.slow
def test_nothing_else_changes(whole: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.zarr"
    more = ["--slab", SLAB, "--inputs", "--order", "dataset", "--batch-size", 3]
    extracted(*options(folder, path, *more))
    without = ("erf/", "checksums/")
    kept = {
        p: data for p, data in array_bytes(whole).items() if not p.startswith(without)
    }
    plain = array_bytes(path)
    assert {p: data for p, data in plain.items() if not p.startswith(without)} == kept
    assert not any(p.startswith("erf/") for p in plain)


@pytest.mark.slow
def test_a_slab_without_any_readable_image(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ones.zarr"
    more = ["--sites", "embed", *SMALL, "--slab", 1, "--erf", 10, "--order", "dataset"]
    extracted(*VIT, "--data", folder, "-o", path, *more)
    store = open_store(path)
    assert np.asarray(store.erf_counts()).tolist() == store.valid.astype(int).tolist()
    empty = int(np.flatnonzero(~store.valid)[0])
    assert not store.erf("embed")[empty].any()
    assert store.erf("embed")[empty - 1].any()
    assert validate(path, deep=True) == []


@pytest.mark.slow
def test_ablated_skips_leave_the_field(folder: Path, tmp_path: Path) -> None:
    fields = []
    for more in ([], ["--ablate-skip", "blocks.0"]):
        path = tmp_path / f"{len(more)}.zarr"
        given = [
            *VIT,
            "--data",
            folder,
            "-o",
            path,
            "--images",
            4,
            "--sites",
            "blocks.0.out",
        ]
        extracted(*given, "--erf", 2, *SMALL, *more)
        fields.append(np.asarray(open_store(path).erf("blocks.0.out"))[0])
    share = [field[8:24, 16:32].sum() / field.sum() for field in fields]
    assert (
        share[1] < share[0]
    )  # the four cells in the middle no longer see themselves past the block


# kernels, memory, faults ----------------------------------------------------------------------


def test_plain_attention_where_the_fused_kernel_has_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small("test_vit", (32, 48), patch_size=8)
    table, x = site_table(model), images(model, 2)
    sites = [table["blocks.0.out"], table["embed"]]
    fused = ErfPasses(model, table, sites, CPU)
    wanted = fused.fields(x)
    gradient = torch.autograd.grad

    def broken(*args: Any, **kwargs: Any) -> Any:
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("derivative for aten::_fused is not implemented")
        return gradient(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", broken)
    passes = ErfPasses(model, table, sites, CPU)
    cost = passes.probe(x)
    assert passes.plain_attention
    assert passes.without([]).plain_attention
    assert cost.left_out == {}
    for name, field in passes.fields(x).items():
        torch.testing.assert_close(field, wanted[name], rtol=1e-4, atol=1e-6)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no derivative at all")

    monkeypatch.setattr(torch.autograd, "grad", never)
    with pytest.raises(
        VitseeError, match=r"--erf is not supported: .*no derivative at all"
    ):
        ErfPasses(model, table, sites, CPU).probe(x)


def test_cost_in_words_and_batches_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitsee_core.extraction import erf

    monkeypatch.setattr(erf, "memory_bytes", lambda: 4000)
    cost = ErfCost(0.25, 100, {})
    assert cost.batch_size(CPU, 32) == 10
    assert cost.batch_size(CPU, 4) == 4
    assert ErfCost(0.25, 10**6, {}).batch_size(CPU, 32) == 1
    said = cost.describe([10, 10, 5], 3)
    assert (
        "9 backward passes over at most 10 images, about 6.25 s and 1.0 kB of memory"
        in said
    )


def test_a_gradient_that_is_not_finite_and_a_signal() -> None:
    model, table, sites = toy(Boxes(), (9, 9))
    passes = ErfPasses(model, table, sites, CPU)
    sums = ErfSums(passes, (9, 9), 2)
    sums.start()
    x = images(model, 3)
    assert not sums.add(x, lambda: True)
    assert sums.add(x, lambda: False)
    assert sums.finish("slab 0")["erf/count"] == 3
    with torch.no_grad():
        model.module.get_parameter("blocks.1.0.weight").fill_(float("nan"))
    assert passes.probe(x).left_out == {"blocks.1.out": "its gradient is not finite"}
    assert sums.add(x, lambda: False)
    with pytest.raises(VitseeError, match=r"blocks.1.out is not finite in slab 0"):
        sums.finish("slab 0")


# the store ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_left_out_and_refused(whole: Path, folder: Path, tmp_path: Path) -> None:
    store = open_store(whole)
    left_out = store.manifest.left_out
    assert left_out["logits erf"] == left_out["pooled erf"] == "no image grid"
    with pytest.raises(
        MissingInput, match=r"no receptive field of logits \(left out: no image"
    ):
        store.erf("logits")
    plain = tmp_path / "plain.zarr"
    extracted(*VIT, "--data", folder, "-o", plain, "--sites", "embed", *SMALL)
    with pytest.raises(
        MissingInput, match=r"receptive field of embed \(extract it with --erf 256"
    ):
        open_store(plain).erf("embed")
    with pytest.raises(
        MissingInput, match=r"plain keeps no receptive fields .*--erf 256"
    ):
        open_store(plain).erf_counts()
    path = tmp_path / "no.zarr"
    result = extract(*VIT, "--data", folder, "-o", path, "--sites", "logits", "--erf", 4)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "--erf 4 is not supported: no chosen site has an image grid" in result.stderr
    assert extract(*VIT, "--data", folder, "-o", path, "--erf").exit_code == 2
    assert extract(*VIT, "--data", folder, "-o", path, "--erf", 0).exit_code == 2
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.slow
def test_joining(whole: Path, folder: Path, tmp_path: Path) -> None:
    before = array_bytes(whole)
    command = [*VIT, "--data", folder, "-o", whole]
    result = extract(*command, "--erf", ERF + 1)
    assert result.exit_code == 1
    assert "erf is 6, given 7" in result.stderr
    assert "is complete" in extracted(*command).stderr
    assert "is complete" in extracted(*command, "--erf", ERF).stderr
    assert array_bytes(whole) == before
    old = tmp_path / "old.zarr"  # as a writer that knows no receptive fields makes it
    command = [*VIT, "--data", folder, "-o", old, "--sites", "embed", *SMALL]
    extracted(*command)
    with edited(old) as manifest:
        assert manifest["plan"].pop("erf") is None
    assert open_store(old).plan.erf is None
    assert "is complete" in extracted(*command).stderr
    assert "erf is 0, given 5" in extract(*command, "--erf", 5).stderr
    assert "ablate_skip is []" in extract(*command, "--ablate-skip", "blocks.0").stderr


def test_more_than_there_are_dry_run_and_info(
    whole: Path, folder: Path, tmp_path: Path
) -> None:
    many = options(folder, tmp_path / "no.zarr", "--slab", SLAB, "--erf", 256)
    result = extracted(*many, "--dry-run", "-v")
    rows = {
        line.split(",")[0]: line.split(",")[1:] for line in result.stdout.splitlines()
    }
    assert rows["erf/embed"][:3] == ["3x32x48", "float32", str(3 * (32 * 48 * 4 + 4))]
    assert rows["erf/count"][:2] == ["3", "int64"]
    assert "erf/logits" not in rows
    assert "receptive fields of 10 images at 12 sites" in result.stderr
    assert "logits erf" in result.stderr
    assert not (tmp_path / "no.zarr").exists()
    said = CliRunner().invoke(main, ["info", str(whole)]).stdout
    assert "erf        12 sites, first 6 images" in said
    named = json.loads(CliRunner().invoke(main, ["info", str(whole), "-f", "erf"]).stdout)
    assert named["n_images"] == ERF
    assert named["size"] == [32, 48]
    assert dataclasses.asdict(open_store(whole).plan.erf)["sites"] == tuple(  # type: ignore[arg-type]
        named["sites"]
    )  # type: ignore[arg-type]

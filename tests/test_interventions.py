"""Interventions of an extraction, against the same passes by hand-written hooks in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.extractions import RESNET, VIT, extracted, plant_images
from tests.models_helpers import images, small
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import parse
from vitsee_core.models.interventions.changes import prove
from vitsee_core.models.interventions.switching import Switch
from vitsee_core.models.lasting_changes import ablate_skips
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table
from vitsee_stores import Store, open_store, validate

N = 7
KEPT = ["--sites", "residual,blocks,head", "--dtype", "float32"]
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
SMALL = [
    "--model-arg",
    "embed_dim=48",
    "--model-arg",
    "depth=3",
    "--model-arg",
    "num_heads=3",
]
# Models, and the arguments that load_model makes the same of.
REGISTERS = [
    *VIT, "--model-arg", "reg_tokens=2", *SMALL,
]  # fmt: skip
DISTILLED = [
    "deit_tiny_distilled_patch16_224", "--random-init", "0", "--img-size", "32x48",
    "--model-arg", "patch_size=8", *SMALL,
]  # fmt: skip
MIXER = ["mixer_s16_224", "--random-init", "0", "--img-size", "32x48"]
MODELS = {"vit": VIT, "registers": REGISTERS, "distilled": DISTILLED, "mixer": MIXER}
MODELS |= {"resnet": RESNET}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


class Bases(dict[str, Path]):
    """Plain extractions, made when they are asked for."""

    def __init__(self, folder: Path, place: Path) -> None:
        super().__init__()
        self.folder, self.place = folder, place

    def __missing__(self, name: str) -> Path:
        heads = [] if name in ("mixer", "resnet") else ["--sites", "heads"]
        self[name] = self.place / f"{name}.zarr"
        run(MODELS[name], self.folder, self[name], "--inputs", *heads)
        return self[name]


@pytest.fixture(scope="module")
def bases(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(folder, tmp_path_factory.mktemp("bases"))


def run(model: list[str], folder: Path, path: Path, *more: object) -> Store:
    extracted(*model, "--data", folder, "-o", path, *KEPT, *more)
    return open_store(path)


def module_of(model: list[str]) -> Any:
    pairs = list(zip(model[1::2], model[2::2], strict=True))
    sizes = dict(pairs)["--img-size"].split("x")
    arguments = dict(
        value.split("=") for option, value in pairs if option == "--model-arg"
    )
    return load_model(
        model[0],
        random_init=0,
        img_size=(int(sizes[0]), int(sizes[-1])),
        model_args={key: int(value) for key, value in arguments.items()},
    ).module


@torch.no_grad()
def plain_pass(
    model: list[str], base: Path, path: str, change: Any, *, enters: bool = False
) -> Any:
    """The model's logits with `change` of what comes from (or goes into) a module."""
    module, pixels = (
        module_of(model),
        torch.from_numpy(np.asarray(open_store(base).inputs())),
    )
    child = module.get_submodule(path)
    if enters:
        child.register_forward_pre_hook(
            lambda _m, args: (change(args[0].clone()), *args[1:])
        )
    else:
        child.register_forward_hook(lambda _m, _a, output: change(output.clone()))
    return module(pixels).numpy()


def logits(store: Store) -> NDArray[np.float32]:
    return np.asarray(store.vectors("logits"))


def changed(store: Store, base: Path, wanted: Any) -> None:
    """The logits are `wanted`, and not those of the base store."""
    np.testing.assert_allclose(logits(store), wanted, **CLOSE)
    assert np.abs(logits(store) - logits(open_store(base))).max() > 1e-3


def putting(places: Any, values: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        x[:, places] = torch.as_tensor(values, dtype=x.dtype)
        return x

    return change


# against hooks by hand ---------------------------------------------------------------------------


@pytest.mark.slow
def test_zero_class_token(bases: Bases, folder: Path, tmp_path: Path) -> None:
    store = run(VIT, folder, tmp_path / "a.zarr", "--replace", "cls@blocks.2.out=zero")
    changed(
        store, bases["vit"], plain_pass(VIT, bases["vit"], "blocks.2", putting(0, 0.0))
    )
    assert not store.acts("blocks.2.out")[:, 0].any()
    before = open_store(bases["vit"]).acts("blocks.2.out")[:, 1:]
    np.testing.assert_array_equal(store.acts("blocks.2.out")[:, 1:], before)
    assert validate(tmp_path / "a.zarr", deep=True) == []


@pytest.mark.slow
def test_mean_registers(bases: Bases, folder: Path, tmp_path: Path) -> None:
    base = bases["registers"]
    text = f"registers@blocks.1.out=mean:{base}"
    store = run(REGISTERS, folder, tmp_path / "a.zarr", "--replace", text)
    mean = np.asarray(open_store(base).acts("blocks.1.out"), np.float64).mean(0)[1:3]
    changed(store, base, plain_pass(REGISTERS, base, "blocks.1", putting([1, 2], mean)))


@pytest.mark.slow
def test_noise_of_a_distilled_model(bases: Bases, folder: Path, tmp_path: Path) -> None:
    """The stored noise gives the same logits by hand; its moments are those of the base store."""
    base = bases["distilled"]
    text = f"cls,dist@blocks.0.out=noise:{base}"
    store = run(DISTILLED, folder, tmp_path / "a.zarr", "--replace", text)
    noise = store.acts("blocks.0.out")[:, :2]
    changed(store, base, plain_pass(DISTILLED, base, "blocks.0", putting([0, 1], noise)))
    plain = np.asarray(open_store(base).acts("blocks.0.out"))[:, :2]
    normal = (noise - plain.mean(0)) / plain.std(0)
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1
    assert np.abs(normal[0] - normal[1]).max() > 1


@pytest.mark.slow
def test_shuffle_of_an_in_place_sum(bases: Bases, folder: Path, tmp_path: Path) -> None:
    """`mid` is no module's output: both the second branch and its skip see the change."""
    base = bases["vit"]
    text = f"cls@blocks.1.mid=shuffle:{base}"
    store = run(VIT, folder, tmp_path / "a.zarr", "--replace", text)
    plain = np.asarray(open_store(base).acts("blocks.1.mid"))
    found = np.asarray(store.acts("blocks.1.mid"))
    np.testing.assert_array_equal(found[:, 1:], plain[:, 1:])
    partners = [
        int(np.flatnonzero((plain[:, 0] == own).all(1))[0]) for own in found[:, 0]
    ]
    assert sorted(partners) == list(range(N)) and all(
        p != i for i, p in enumerate(partners)
    )
    module = module_of(VIT)
    with torch.no_grad():
        mid = torch.from_numpy(found)
        block = module.blocks[1]
        x = mid + block.drop_path2(block.ls2(block.mlp(block.norm2(mid))))
        for block in module.blocks[2:]:
            x = block(x)
        wanted = module.forward_head(module.norm(x)).numpy()
    changed(store, base, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet", pytest.param("mixer", marks=pytest.mark.slow)]
)
def test_patches_of_models_without_prefix(
    bases: Bases, folder: Path, tmp_path: Path, name: str
) -> None:
    base, model = bases[name], MODELS[name]
    path = {"resnet": "layer2.0", "mixer": "blocks.0"}[name]
    store = run(
        model, folder, tmp_path / "a.zarr", "--replace", f"patches@{path}.out=mean:{base}"
    )
    mean = torch.from_numpy(np.asarray(open_store(base).acts(f"{path}.out")).mean(0))

    def change(x: Tensor) -> Tensor:
        if x.ndim == 3:
            return mean.expand_as(x).clone()
        return mean.T.reshape(x.shape[1:]).expand_as(x).clone()

    wanted = plain_pass(model, base, path, change)
    np.testing.assert_allclose(logits(store), wanted, **CLOSE)
    assert np.ptp(logits(store), axis=0).max() < 1e-4  # nothing of the image is left


@pytest.mark.slow
def test_outliers_and_as_many_others(bases: Bases, folder: Path, tmp_path: Path) -> None:
    plain = np.asarray(open_store(bases["vit"]).acts("blocks.2.out"))
    norms = np.linalg.norm(plain[:, 1:], axis=-1)
    for kind in ("outliers", "random"):
        text = f"{kind}:3@blocks.2.out=zero"
        store = run(VIT, folder, tmp_path / f"{kind}.zarr", "--replace", text)
        gone = ~np.asarray(store.acts("blocks.2.out"))[:, 1:].any(-1)
        assert (gone.sum(1) == 3).all()
        if kind == "outliers":
            assert norms[gone].reshape(N, 3).min(1) == pytest.approx(
                np.sort(norms)[:, -3]
            )
        else:
            assert len(np.unique(gone, axis=0)) > 1

    def change(x: Tensor) -> Tensor:
        x[:, 1:][torch.from_numpy(gone)] = 0
        return x

    changed(store, bases["vit"], plain_pass(VIT, bases["vit"], "blocks.2", change))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vit", "mean"),
        ("registers", "zero"),
        pytest.param("registers", "mean", marks=pytest.mark.slow),
        pytest.param("distilled", "mean", marks=pytest.mark.slow),
    ],
)
def test_heads(bases: Bases, folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    base, model = bases[name], MODELS[name]
    value = "" if kind == "zero" else f"=mean:{base}"
    plain = np.asarray(open_store(base).acts("blocks.1.attn.heads"))
    n_heads = open_store(base).plan.attention[0].n_heads[1]
    width, head = plain.shape[2] // n_heads, n_heads - 1
    text = f"blocks.1:0,{head}{value}"
    store = run(model, folder, tmp_path / "a.zarr", "--ablate-heads", text)
    channels = [*range(width), *range(head * width, (head + 1) * width)]

    def change(x: Tensor) -> Tensor:
        own = 0.0 if kind == "zero" else torch.from_numpy(plain.mean(0)[:, channels])
        x[:, :, channels] = own
        return x

    changed(
        store, base, plain_pass(model, base, "blocks.1.attn.proj", change, enters=True)
    )
    assert store.manifest.model["interventions"] == [f"heads 0,{head}={kind} at blocks.1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options", "cut"),
    [
        ("test_vit", 32, {}, ["blocks.1"]),
        ("resnet18", 64, {}, ["layer1.0"]),
        ("resnetv2_50", 64, {"layers": (1, 1, 1, 1)}, []),
        ("convnext_atto", 64, {}, []),
        ("swin_tiny_patch4_window7_224", 64, {"depths": (1, 1), "window_size": 4}, []),
        ("cait_xxs24_224", 32, {"patch_size": 8, "depth": 2}, []),
        ("eva02_tiny_patch14_224", 28, {"depth": 2}, []),
        ("levit_128s", 64, {}, []),
        ("vit_small_patch16_18x2_224", 32, {"patch_size": 8, "depth": 2}, []),
    ],
)
def test_every_site_of_tokens(name: str, size: int, options: Any, cut: list[str]) -> None:
    """What lies on a grid is replaced as proven, beside ablated skips too; the rest is refused."""
    model = small(name, size, **options)
    if cut:
        ablate_skips(model, cut)
    table, x, done = site_table(model), images(model), 0
    for site in table.sites:
        if site.alias_of is not None or set(site.groups) <= {"modules", "all"}:
            continue
        switch = Switch(name, table, parse([f"all@{site.name}=zero"]))
        if site.kind != "tokens":
            with pytest.raises(ModelError, match="without tokens that could be replaced"):
                switch.lines()
            continue
        changes = switch.changes(model.module)
        changes.index = np.arange(len(x))
        prove(model, table, changes, x)
        done += 1
    assert done >= 12

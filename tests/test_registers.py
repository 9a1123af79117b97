"""Registers added at test time, against forward passes written out in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from torch import Tensor, nn

import vitsee
from tests.extractions import extract, plant_images
from vitsee_cli.main import main
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import InterventionError, parse
from vitsee_core.models.interventions.replacements import other_neurons, register_neurons
from vitsee_core.models.lasting_changes import add_registers
from vitsee_core.models.load import load_model
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

N, NEURON, PATCH = 5, 7, 10
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
KEPT: dict[str, Any] = {
    "sites": ("blocks", "hidden", "head"),
    "dtype": "float32",
    "inputs": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "cls": {},
    "registers": {"reg_tokens": 2},
    "average": {"class_token": False, "global_pool": "avg"},
}


def planted(kind: str) -> Any:
    """A ViT of three blocks in which one neuron of blocks.1 answers to one position, and writes a
    large vector there."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "img_size": (32, 48),
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 3,
    }
    sizes |= {"num_heads": 3, **KINDS[kind]}
    module: Any = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    along = torch.randn(48, generator=torch.Generator().manual_seed(1))
    along = (along - along.mean()) / (along - along.mean()).norm()
    mlp = module.blocks[1].mlp
    with torch.no_grad():
        at = module.pos_embed.shape[1] - 24 + PATCH
        module.pos_embed[0, at] += 10 * along
        mlp.fc1.weight[NEURON], mlp.fc1.bias[NEURON] = 4 * along, -14.0
        mlp.fc2.weight[:, NEURON] = 20 * torch.randn(48)
    return module


@dataclass
class Bases:
    """Planted models, and plain extractions of them."""

    images: Path
    folder: Path

    def __call__(self, kind: str) -> Store:
        path = self.folder / f"{kind}.zarr"
        return vitsee.extract(planted(kind), self.images, path, **KEPT)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    folder = tmp_path_factory.mktemp("registers")
    return Bases(plant_images(folder / "images", N), folder)


def changed(bases: Bases, kind: str, text: str, path: Path, **more: Any) -> Store:
    text = f"{text}:{bases(kind).path}"
    return vitsee.extract(
        planted(kind), bases.images, path, registers=text, **{**KEPT, **more}
    )


@torch.no_grad()
def by_hand(
    module: Any, pixels: Tensor, n: int, neurons: dict[int, list[int]]
) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """The blocks' outputs and the logits, every step written out."""
    x = module._pos_embed(module.patch_embed(pixels))
    x = module.norm_pre(module.patch_drop(x))
    start = module.num_prefix_tokens
    x = torch.cat([x[:, :start], torch.zeros(len(x), n, x.shape[2]), x[:, start:]], 1)
    outs = []
    for i, block in enumerate(module.blocks):
        x = x + block.ls1(block.attn(block.norm1(x)))
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))
        for neuron in neurons.get(i, []):
            most = hidden[:, :, neuron].max(1).values
            hidden[:, :, neuron] = 0
            hidden[:, start : start + n, neuron] = most[:, None]
        x = x + block.ls2(block.mlp.fc2(hidden))
        outs.append(x.numpy())
    x = torch.cat([x[:, :start], x[:, start + n :]], 1)
    return outs, module.forward_head(module.norm(x)).numpy()


def neurons_of(base: Store, k: int, last: int) -> dict[int, list[int]]:
    """The neurons by their definition, from whole arrays."""
    patches = np.asarray(base.acts(f"blocks.{last}.out", "patches"))
    norms = np.linalg.norm(patches, axis=-1)
    middle = np.median(norms)
    there = norms > middle + 6 * 1.4826 * np.median(np.abs(norms - middle))
    means = []
    for i in range(last + 1):
        hidden = np.asarray(base.acts(f"blocks.{i}.mlp.hidden", "patches"), np.float64)
        means += [(value, i, j) for j, value in enumerate(hidden[there].mean(0))]
    found: dict[int, list[int]] = {}
    for _, i, j in sorted(means, reverse=True)[:k]:
        found.setdefault(i, []).append(j)
    return {i: sorted(own) for i, own in sorted(found.items())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [
        ("cls", 1, 1),
        ("average", 2, 9),
        pytest.param("registers", 1, 40, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_pass_written_out(
    bases: Bases, tmp_path: Path, kind: str, n: int, k: int
) -> None:
    store = changed(bases, kind, f"{n}:{k}@blocks.1.out=outliers", tmp_path / "a.zarr")
    base = bases(kind)
    neurons = neurons_of(base, k, 1)
    assert NEURON in neurons[1]
    outs, logits = by_hand(
        planted(kind), torch.from_numpy(np.asarray(base.inputs())), n, neurons
    )
    for i, wanted in enumerate(outs):
        np.testing.assert_allclose(store.acts(f"blocks.{i}.out"), wanted, **CLOSE)
    np.testing.assert_allclose(store.vectors("logits"), logits, **CLOSE)
    assert np.abs(logits - np.asarray(base.vectors("logits"))).max() > 1e-3
    prefix = {
        "cls": "cls reg0",
        "average": "reg0 reg1",
        "registers": "cls reg0 reg1 reg2",
    }
    layout = store.site("blocks.1.out").layout
    assert layout is not None and " ".join(layout.prefix) == prefix[kind]
    words = [
        f"blocks.{i}.mlp.hidden {' '.join(map(str, js))}" for i, js in neurons.items()
    ]
    line = f"{n} register{'s' * (n > 1)} with {k} register neurons: {', '.join(words)}"
    assert store.manifest.identity["interventions"] == [line]
    assert store.manifest.identity["reference_stores"] == [base.manifest.store_id]


@pytest.mark.slow
def test_the_outlier_moves_to_the_register(bases: Bases, tmp_path: Path) -> None:
    store = changed(bases, "cls", "1:1@blocks.1.out=outliers", tmp_path / "a.zarr")
    plain = np.linalg.norm(bases("cls").acts("blocks.1.out")[:, 1:], axis=-1)
    assert (plain.argmax(1) == PATCH).all()
    usual = np.sort(plain, 1)[:, -2]  # of the largest of the others
    assert (plain.max(1) > 20 * usual).all()
    norms = np.linalg.norm(store.acts("blocks.1.out")[:], axis=-1)
    assert (norms[:, 2:].max(1) < 3 * usual + 20).all() and (
        norms[:, 1] > 0.5 * plain.max(1)
    ).all()


@pytest.mark.slow
def test_random_neurons_leave_it(bases: Bases, tmp_path: Path) -> None:
    text = "1:3@blocks.1.out=random"
    store = changed(bases, "cls", text, tmp_path / "a.zarr")
    other = changed(bases, "cls", text, tmp_path / "b.zarr", seed=1)
    lines = [one.manifest.identity["interventions"][0] for one in (store, other)]
    assert lines[0] != lines[1] and all(
        "1 register with 3 random neurons" in x for x in lines
    )
    norms = np.linalg.norm(store.acts("blocks.1.out")[:], axis=-1)
    assert (norms[:, 2:].argmax(1) == PATCH).all()


# neurons ------------------------------------------------------------------------------------------


class Arrays:
    """What of a store the choice of neurons reads: two slabs, an unreadable image."""

    label = "tiny"

    def __init__(self, arrays: dict[str, Any], valid: list[bool]) -> None:
        self.arrays = {
            name: np.array(x, np.float32)[:, None] for name, x in arrays.items()
        }
        self.valid = np.array(valid)

    def slabs(self) -> list[Any]:
        return [_Slab(self, slice(0, 2)), _Slab(self, slice(2, 3))]


class _Slab:
    def __init__(self, store: Arrays, rows: slice) -> None:
        self.store, self.rows, self.valid = store, rows, store.valid[rows]

    def acts(self, site: str, tokens: str) -> NDArray[np.float32]:
        assert tokens == "patches"
        return self.store.arrays[site][self.rows]


def tiny() -> Any:
    """Norms 1 to 14 and an outlier of 50 in the first and third image; medians by hand: of
    (1, 2, 3, 50, 2, 3, 14, 50) 3, deviations (2, 1, 0, 47, 1, 0, 11, 47) 1.5, so the bound is
    3 + 6 x 1.4826 x 1.5 = 16.3, above 14; without the factor it would be 12."""
    return Arrays(
        {
            "out": [[[1], [2], [3], [50]], [[np.nan]] * 4, [[2], [3], [14], [-50]]],
            "a": [
                [[9, 9]] * 3 + [[1, 4]],
                [[np.nan] * 2] * 4,
                [[9, 9], [9, 9], [90, 9], [3, 0]],
            ],
            "b": [[[9, 9]] * 3 + [[2, 5]], [[np.nan] * 2] * 4, [[9, 9]] * 3 + [[0, 1]]],
        },
        [True, False, True],
    )


def test_neurons_by_hand() -> None:
    """Means at the outliers: a (2, 2), b (1, 3); of equal ones the first."""
    for n, wanted in [
        (1, {"b": [1]}),
        (2, {"a": [0], "b": [1]}),
        (3, {"a": [0, 1], "b": [1]}),
        (4, {"a": [0, 1], "b": [0, 1]}),
    ]:
        found = register_neurons(tiny(), "out", ["a", "b"], n)
        assert {name: x.tolist() for name, x in found.items()} == wanted
    with pytest.raises(ModelError, match="there are 4 neurons up to out, not 5"):
        register_neurons(tiny(), "out", ["a", "b"], 5)
    with pytest.raises(ModelError, match="no patch of b in tiny has an outlying norm"):
        register_neurons(tiny(), "b", ["a"], 1)


def test_others_by_hand() -> None:
    found = {"a": np.array([0, 2]), "b": np.array([1])}
    for seed in range(20):
        drawn = other_neurons(found, {"a": 4, "b": 3}, seed)
        assert drawn["a"].tolist() == [1, 3] and drawn["b"].tolist() in ([0], [2])
    with pytest.raises(ModelError, match="a has 1 other neurons, not 2"):
        other_neurons(found, {"a": 3, "b": 3}, 0)


# refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("0:10@blocks.1.out=outliers:a.zarr", "1:0@blocks.1.out=outliers:a.zarr"),
        *("1@blocks.1.out=outliers:a.zarr", "1:10=outliers:a.zarr"),
        *("1:10@blocks.1.out=mean:a.zarr", "1:10@blocks.1.out=outliers"),
    ],
)
def test_malformed(text: str) -> None:
    with pytest.raises(InterventionError) as caught:
        parse(registers=[text])
    assert "expected N:NEURONS@SITE=outliers:STORE" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_given_twice() -> None:
    with pytest.raises(
        InterventionError, match="--registers is given 2 times; expected one"
    ):
        parse(registers=["1:1@last=outliers:a.zarr"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options", "phrase"),
    [
        ("resnet18", (64, 64), {}, "no sequence of tokens goes into its blocks"),
        (
            *(
                "swin_tiny_patch4_window7_224",
                (64, 64),
                {"depths": (1, 1), "window_size": 4},
            ),
            "expected a plain ViT",
        ),
        ("mixer_s16_224", (32, 32), {}, "has a fixed number of tokens"),
        (
            "eva02_tiny_patch14_224",
            (28, 28),
            {"depth": 2},
            "has a fixed number of tokens",
        ),
        (
            "vit_relpos_small_patch16_224",
            (32, 32),
            {"depth": 2},
            "has a fixed number of tokens",
        ),
        (
            "cait_xxs24_224",
            (64, 64),
            {"depth": 2},
            "the tokens of embed are no longer known",
        ),
        (
            "xcit_nano_12_p16_224",
            (32, 32),
            {"depth": 2},
            "takes the output of blocks.1 as it is",
        ),
    ],
)
def test_models_that_take_no_more_tokens(
    name: str, size: tuple[int, int], options: dict[str, Any], phrase: str
) -> None:
    model = load_model(name, random_init=0, img_size=size, model_args=options)
    hooks = n_hooks(model.module)
    with pytest.raises(ModelError) as caught:
        add_registers(model, 1)
    assert phrase in str(caught.value) and "\n" not in str(caught.value)
    assert name in str(caught.value)
    assert model.geometry is None and n_hooks(model.module) == hooks


def n_hooks(module: nn.Module) -> int:
    return sum(len(child._forward_pre_hooks) for child in module.modules())


@pytest.mark.slow
def test_what_stores_lack(bases: Bases, tmp_path: Path) -> None:
    base, module = bases("cls"), planted("cls")
    bare, output = tmp_path / "bare.zarr", tmp_path / "x.zarr"
    vitsee.extract(module, bases.images, bare, sites="blocks")
    for text, phrase in [
        (f"1:9@blocks.1.out=outliers:{tmp_path}/none.zarr", "no store at"),
        (f"1:9@blocks.1.out=outliers:{bare}", "extract adds it with --sites"),
        (
            f"1:9999@blocks.1.out=outliers:{base.path}",
            "there are 384 neurons up to blocks.1.out",
        ),
        (f"1:1@blocks.0..1.out=outliers:{base.path}", "expected one block's output"),
        (f"1:1@norm=outliers:{base.path}", "expected one block's output"),
        (f"1:1@blocks.8.out=outliers:{base.path}", "no site matches 'blocks.8.out'"),
        (f"1:1@blocks.1.out=outliers:{bases('average').path}", "has other weights"),
    ]:
        with pytest.raises(VitseeError) as caught:
            vitsee.extract(module, bases.images, output, registers=text, **KEPT)
        assert phrase in str(caught.value) and "\n" not in str(caught.value)
        assert not output.exists()


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    given = "1:10@blocks.1.out=outliers:none.zarr"
    name = f"test_vit?random-init=0&registers={given}"
    result = CliRunner().invoke(main, ["sites", name, "--sites", "blocks.1.out,norm"])
    assert "cls reg0" in result.stdout
    assert (
        "extract runs the model with 1 register with 10 register neurons" in result.stderr
    )
    result = extract(
        "demo:vit", "--data", "demo:test", "-o", tmp_path / "x", "--registers", "1"
    )
    assert result.exit_code == 2 and "expected N:NEURONS@SITE" in result.stderr

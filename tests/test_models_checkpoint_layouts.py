"""Published layouts of checkpoints: miniatures with their keys give the activations of timm's model
with their normalisation, heads and activation function, whatever the file is called."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from torch import Tensor, nn

from tests.extractions import extracted, plant_images
from tests.models_helpers import VIT, redraw
from tests.test_models_checkpoints import State, body, clip_names, refused, saved, under
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.weights.checkpoint_files import read_torchscript
from vitsee_stores import open_store

IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
OPENAI = OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
HALF = (0.5,) * 3, (0.5,) * 3
PLAIN, BEIT, CLIP = (
    "vit_tiny_patch16_224",
    "beit_base_patch16_224",
    "vit_base_patch16_clip_224",
)
# BEiT's pretraining shares one table of relative positions among the blocks.
SHARED: dict[str, Any] = {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False}
SHARED["global_pool"] = "token"
SMALL: dict[str, Any] = {"embed_dim": 384, "depth": 2}  # as wide as ViT-S


def trained(name: str, **args: Any) -> State:
    """Weights of a small model, drawn anew."""
    module = made(name, **args)
    redraw(module, 1)
    return {key: x.clone() for key, x in module.state_dict().items()}


def made(name: str, **args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module: nn.Module = timm.create_model(name, img_size=32, **{**VIT, **args})
    return module.eval()


def dino() -> tuple[Any, dict[str, Any]]:
    state, head = body(trained(PLAIN)), {"head.last_layer.weight_v": torch.zeros(2, 2)}
    student = under("module.backbone.", state) | under("module.", head)
    return {
        "student": student,
        "teacher": under("backbone.", state) | head,
        "epoch": 1,
    }, {}


def moco() -> tuple[Any, dict[str, Any]]:
    """ViT-S, 12 heads of 32 channels."""
    state = trained("vit_small_patch16_224", **SMALL, num_heads=12)
    own, other = (
        under("module.base_encoder.", body(state)),
        under("module.momentum_encoder.", state),
    )
    more = {"module.predictor.0.weight": torch.zeros(2, 2)}
    return {"arch": "vit_small", "state_dict": own | other | more}, {"num_heads": 12}


def mae() -> tuple[Any, dict[str, Any]]:
    extra = {
        "mask_token": torch.zeros(1, 1, 8),
        "decoder_pos_embed": torch.zeros(1, 17, 8),
    }
    extra |= {"decoder_embed.weight": torch.zeros(8, 48)}
    return {"model": body(trained(PLAIN)) | extra}, {}


def deit() -> tuple[Any, dict[str, Any]]:
    return {"model": trained("deit_tiny_distilled_patch16_224")}, {}


def dinov2(**args: Any) -> tuple[Any, dict[str, Any]]:
    state = body(trained("vit_small_patch14_dinov2", **args))
    return {**state, "mask_token": torch.zeros(1, 48)}, args


def dinov2_registers() -> tuple[Any, dict[str, Any]]:
    """Its position table has a row for the class token, timm's has that row added to the token."""
    state = body(trained("vit_small_patch14_reg4_dinov2"))
    state["register_tokens"] = state.pop("reg_token")
    place = torch.full((1, 1, 48), 0.25)
    state["pos_embed"] = torch.cat([place, state["pos_embed"]], 1)
    state["cls_token"] = state["cls_token"] - place
    return {**state, "mask_token": torch.zeros(1, 48)}, {}


def beit(version: int = 1) -> tuple[Any, dict[str, Any]]:
    state = body(trained(BEIT, **SHARED))
    extra = {"mask_token": torch.zeros(1, 1, 48), "lm_head.weight": torch.zeros(9, 48)}
    extra |= {
        "rel_pos_bias.relative_position_index": torch.zeros(17, 17, dtype=torch.int64)
    }
    if version == 2:
        extra |= {"cls_pt_layers.0.norm1.weight": torch.zeros(48)}
    return {"model": state | extra}, SHARED


def openai() -> tuple[Any, dict[str, Any]]:
    raw = under("visual.", clip_names(trained(CLIP, act_layer="quick_gelu")))
    text = {"token_embedding.weight": torch.zeros(3, 3), "logit_scale": torch.zeros(())}
    sizes = {
        x: torch.tensor(7) for x in ("input_resolution", "context_length", "vocab_size")
    }
    return raw | text | sizes, {"act_layer": "quick_gelu"}


# Layout -> (its file and timm's arguments), the model, normalisation, crop, interpolation.
LAYOUTS: dict[str, tuple[Callable[[], Any], str, Any, float, str]] = {
    "DINO": (dino, PLAIN, IMAGENET, 0.875, "bicubic"),
    "MoCo v3": (moco, "vit_small_patch16_224", IMAGENET, 0.875, "bilinear"),
    "MAE": (mae, PLAIN, IMAGENET, 0.875, "bicubic"),
    "DeiT": (deit, "deit_tiny_distilled_patch16_224", IMAGENET, 0.875, "bicubic"),
    "DINOv2": (dinov2, "vit_small_patch14_dinov2", IMAGENET, 0.875, "bicubic"),
    "DINOv2 ": (
        dinov2_registers,
        "vit_small_patch14_reg4_dinov2",
        IMAGENET,
        0.875,
        "bicubic",
    ),
    "BEiT": (beit, BEIT, HALF, 0.875, "bicubic"),
    "BEiT v2": (lambda: beit(2), BEIT, IMAGENET, 0.875, "bicubic"),
    "OpenAI's CLIP": (openai, CLIP, OPENAI, 1.0, "bicubic"),
}


def gives(
    model: LoadedModel, name: str, state: State, normalisation: Any, **args: Any
) -> None:
    """The activations are those of timm's model with this state, of images normalised so."""
    expected = made(name, **args)
    expected.load_state_dict(state)
    wanted = outputs(expected, dict(zip(("mean", "std"), normalisation, strict=True)))
    torch.testing.assert_close(
        outputs(model.module, model.transform), wanted, rtol=1e-5, atol=1e-5
    )


def loaded(path: Path, name: str, **options: Any) -> LoadedModel:
    """A small model of the architecture, whose own number of heads it has if it is a plain ViT."""
    small = {**VIT, **(SMALL if "vit_small_patch16" in name else {})}
    if "patch16_224" in name and name.startswith("vit"):
        del small["num_heads"]
    return load_model(name, checkpoint=path, img_size=32, model_args=small, **options)


def outputs(module: nn.Module, transform: Mapping[str, Any]) -> Tensor:
    """(images, tokens, dim) of pixels, as the transform normalises them."""
    pixels = torch.rand((2, 3, 32, 32), generator=torch.Generator().manual_seed(3))
    mean, std = (torch.tensor(transform[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        features: Tensor = module.forward_features((pixels - mean) / std)  # type: ignore[operator]
    return features


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_miniature_gives_timm_s_activations(layout: str, tmp_path: Path) -> None:
    make, name, (mean, std), crop, interpolation = LAYOUTS[layout]
    content, args = make()
    model = loaded(saved(tmp_path / "weights.pth", content), name)
    assert model.weights["layout"] == layout.strip() and "assumed" not in model.weights
    transform = model.transform
    assert (transform["mean"], transform["std"]) == (mean, std)
    assert (transform["crop_pct"], transform["interpolation"]) == (crop, interpolation)
    args = {**(SMALL if layout == "MoCo v3" else {}), **args}
    gives(model, name, trained(name, **args), (mean, std), **args)
    assert {key: model.model_args[key] for key in args} == args
    (note, *_) = model.notes()
    assert note.startswith(
        f"weights.pth is a checkpoint of {layout.strip()}: mean {mean[0]:g}, "
    )


@pytest.mark.slow
def test_what_was_given_wins(tmp_path: Path) -> None:
    """Also the 6 heads of timm, with which the shapes of MoCo's fit and other numbers come out."""
    path = saved(tmp_path / "w.pth", mae()[0])
    given: dict[str, Any] = {
        "img_mean": (0.1,) * 3,
        "img_std": (0.2,) * 3,
        "crop_pct": 0.5,
    }
    transform = loaded(path, PLAIN, **given).transform
    assert (transform["mean"], transform["std"]) == ((0.1,) * 3, (0.2,) * 3)
    assert transform["crop_pct"] == 0.5
    path = saved(tmp_path / "moco.pth", moco()[0])
    own = {**VIT, **SMALL, "num_heads": 6}
    six = load_model(
        "vit_small_patch16_224", checkpoint=path, img_size=32, model_args=own
    )
    assert six.module.blocks[0].attn.num_heads == 6  # type: ignore[union-attr, index]
    twelve = loaded(path, "vit_small_patch16_224")
    a, b = (outputs(model.module, model.transform) for model in (six, twelve))
    assert not torch.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_large_inputs_are_whole_images(tmp_path: Path) -> None:
    """As MAE evaluates: 224 pixels of 256, larger inputs without a border."""
    path = saved(tmp_path / "w.pth", mae()[0])
    for size, crop in ((224, 0.875), (232, 1.0)):
        model = load_model(PLAIN, checkpoint=path, img_size=size, model_args=VIT)
        assert model.transform["crop_pct"] == crop


@pytest.mark.parametrize(
    ("content", "layout", "normalisation"),
    [
        (lambda: body(trained(PLAIN)), "DINO's or MAE's encoder", IMAGENET),
        (lambda: {"model": body(trained(PLAIN))}, "DINO's or MAE's encoder", IMAGENET),
        (lambda: {"model": trained(PLAIN)}, "DeiT", IMAGENET),
        (lambda: {"state_dict": trained(PLAIN)}, None, HALF),
        (lambda: {"model": trained(PLAIN), "epoch": 3}, None, HALF),
        (lambda: trained(PLAIN), None, HALF),
    ],
)
def test_what_nothing_shows_is_assumed_and_said(
    content: Callable[[], Any], layout: str | None, normalisation: Any, tmp_path: Path
) -> None:
    path = saved(tmp_path / "dino.pth", content())
    model = loaded(path, PLAIN)
    mean, std = normalisation
    assert (model.transform["mean"], model.transform["std"]) == (mean, std)
    assert model.weights.get("layout") == layout
    assumed = model.weights["assumed"]
    assert (assumed["mean"], assumed["std"], assumed["num_heads"]) == (mean, std, 3)
    (note,) = [line for line in model.notes() if "assumed" in line]
    known = f"may be {layout}" if layout else f"has no known layout: as {PLAIN} has them"
    texts = (", ".join(f"{x:g}" for x in values) for values in (mean, std))
    assert note.startswith(
        f"dino.pth {known}, assumed are mean {next(texts)}; std {next(texts)}"
    )
    assert "num_heads 3" in note and "--img-mean, --img-std" in note
    assert "--model-arg num_heads=N" in note
    # Whoever says all of it reads nothing of it.
    given: dict[str, Any] = {"img_mean": mean, "img_std": std, "crop_pct": 0.9}
    told = load_model(PLAIN, checkpoint=path, img_size=32, model_args=VIT, **given)
    assert "assumed" not in told.weights and "assumed" not in " ".join(told.notes())


def test_heads_are_not_in_doubt_where_shapes_show_them(tmp_path: Path) -> None:
    """Tables of relative positions have a column for each head; a ResNet has none."""
    path = saved(tmp_path / "w.pth", {"state_dict": trained(BEIT, num_heads=12)})
    own = {key: VIT[key] for key in ("embed_dim", "depth", "patch_size")}
    model = load_model(BEIT, checkpoint=path, img_size=32, model_args=own)
    assert {*model.weights["assumed"]} == {"mean", "std"}
    state = load_model("test_resnet", random_init=0).module.state_dict()
    model = load_model("test_resnet", checkpoint=saved(tmp_path / "cnn.pth", state))
    assert {*model.weights["assumed"]} == {"mean", "std"}


@pytest.mark.slow
def test_a_store_records_what_was_assumed(tmp_path: Path) -> None:
    path = saved(tmp_path / "own.pth", {"state_dict": trained(PLAIN)})
    plant_images(tmp_path / "data", 4)
    options = ["--checkpoint", path, "--img-size", 32, "--sites", "embed"]
    for key in ("embed_dim", "depth", "patch_size"):
        options += ["--model-arg", f"{key}={VIT[key]}"]
    data = ["--data", tmp_path / "data", "-o", tmp_path / "a.zarr"]
    result = extracted(PLAIN, *options, *data)
    assert "own.pth has no known layout" in result.stderr
    store = open_store(tmp_path / "a.zarr")
    assert store.manifest.model["weights"]["assumed"]["mean"] == [0.5, 0.5, 0.5]
    given = [
        "--img-mean",
        "0.4,0.4,0.4",
        "--img-std",
        "0.2,0.2,0.2",
        "-o",
        tmp_path / "b.zarr",
    ]
    extracted(PLAIN, *options, *data[:2], *given)
    record = open_store(tmp_path / "b.zarr").manifest.model["weights"]
    assert "mean" not in record.get("assumed", {})


@pytest.mark.slow
def test_a_dry_run_counts_the_heads_that_a_layout_brings(tmp_path: Path) -> None:
    path = saved(tmp_path / "moco.pth", moco()[0])
    plant_images(tmp_path / "data", 4)
    common = ["--model-arg", "depth=2", "--model-arg", "patch_size=8", "--img-size", 32]
    common += ["--data", tmp_path / "data", "-o", tmp_path / "s.zarr", "--dry-run"]
    lines = []
    for weights in (
        ("--checkpoint", path),
        ("--random-init", 0, "--model-arg", "num_heads=12"),
        ("--random-init", 0),
    ):
        planned = extracted(
            "vit_small_patch16_224", *weights, *common
        ).stdout.splitlines()
        lines += [line for line in planned if line.startswith("attention/")]
    assert lines[0] == lines[1] != lines[2]


def test_other_clips_may_compute_either_activation(tmp_path: Path) -> None:
    raw, _ = openai()
    for size in ("input_resolution", "context_length", "vocab_size"):
        del raw[size]
    model = loaded(saved(tmp_path / "w.pth", {"state_dict": under("module.", raw)}), CLIP)
    assert model.weights["layout"] == "CLIP" and "act_layer" not in model.model_args
    assert model.weights["assumed"]["mean"] == OPENAI_CLIP_MEAN


def test_a_layout_for_another_architecture(tmp_path: Path) -> None:
    path = saved(tmp_path / "b.pth", beit()[0])
    with pytest.raises(
        ModelError, match=r"b\.pth is a checkpoint of BEiT, but .* does not take"
    ):
        loaded(path, PLAIN)


# ------------------------------------------------------------------------------------ TorchScript


class Holder(nn.Module):
    """Modules and parameters under the names of a state dict."""

    def __init__(self, state: State) -> None:
        super().__init__()
        inner: dict[str, State] = {}
        for name, x in state.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = x
            elif x.is_floating_point():
                self.register_parameter(first, nn.Parameter(x.half()))
            else:
                self.register_buffer(first, x)
        for first, part in inner.items():
            self.add_module(first, Holder(part))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """OpenAI's CLIP as published: half precision in a TorchScript archive."""
    raw, _ = openai()
    with pytest.warns(FutureWarning):
        torch.jit.save(torch.jit.script(Holder(raw)), tmp_path / "ViT-B-16.pt")
    return tmp_path / "ViT-B-16.pt"


def test_openai_s_archive_is_read_without_its_code(archive: Path) -> None:
    raw, args = openai()
    state = read_torchscript(archive)
    assert {*state} == {*raw}
    assert all(torch.equal(state[name], x.half() if x.is_floating_point() else x)
               for name, x in raw.items())  # fmt: skip
    model = loaded(archive, CLIP)
    assert model.weights["layout"] == "OpenAI's CLIP" and model.model_args["act_layer"]
    halved = {key: x.half().float() for key, x in trained(CLIP, **args).items()}
    gives(model, CLIP, halved, OPENAI, **args)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("ran",)


def rewritten(archive: Path, change: Mapping[str, bytes], compression: int = 0) -> Path:
    other = archive.with_name("other.pt")
    with (
        zipfile.ZipFile(archive) as source,
        zipfile.ZipFile(other, "w", compression) as target,
    ):
        for name in source.namelist():
            key = name.partition("/")[2]
            target.writestr(name, change.get(key, source.read(name)))
    return other


def test_an_archive_with_more_than_tensors_is_refused(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(rewritten(archive, {"data.pkl": pickle.dumps(Evil(), 2)}))
    assert "holds objects besides tensors" in text and "print" in text
    assert "ran" not in capsys.readouterr().out
    text = refused(rewritten(archive, {}, zipfile.ZIP_DEFLATED))
    assert "is no readable checkpoint" in text and "compressed" in text
    text = refused(rewritten(archive, {"data/0": b"\0"}))
    assert "is no readable checkpoint" in text


# ------------------------------------------------------------------------- timm's configuration


def test_advice_of_timm_s_configuration_is_passed_on() -> None:
    from vitsee_core.models.sources.timm import _pretrained_name

    advice = "natively QuickGELU, use quickgelu model variant for original results"
    for name, said in ((CLIP, [advice]), (CLIP.replace("_224", "_quickgelu_224"), None)):
        module = made(f"{name}.openai")
        record = _pretrained_name(module, name)
        assert record.get("notes") == said
        model = LoadedModel(name, module, (3, 32, 32), {}, record, name)
        lines = [f"{record['pretrained']}: {advice}"] if said else []
        assert model.notes() == lines


# --------------------------------------------------------------------------- DINOv3 and SigLIP


DINOV3, SIGLIP = "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"


def dinov3(biased: bool) -> tuple[State, State, dict[str, Any]]:
    """A file as published, timm's weights, and its arguments."""
    args = {"qkv_bias": True} if biased else {}
    state = trained(DINOV3, **args)
    file = {}
    for name, x in state.items():
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        file[name.replace("reg_token", "storage_tokens")] = x
    for block in range(2):
        prefix = f"blocks.{block}.attn."
        if biased:
            q, v = (file.pop(f"{prefix}{part}_bias") for part in "qv")
            file[f"{prefix}qkv.bias"] = torch.cat([q, torch.full_like(q, 9.0), v])
            file[f"{prefix}qkv.bias_mask"] = torch.cat([torch.ones(48), torch.zeros(48)])
    file |= {"mask_token": torch.zeros(1, 48), "rope_embed.periods": torch.ones(8)}
    return file, state, args


@pytest.mark.parametrize("biased", [True, False])
def test_dinov3_s_own_file(
    biased: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its biases of queries and values are kept, which the named architecture has no room for."""
    file, state, args = dinov3(biased)
    path = saved(tmp_path / "dinov3.pth", file)
    model = load_model(DINOV3, checkpoint=path, img_size=32, model_args=VIT)
    assert model.weights["layout"] == "DINOv3"
    assert model.weights["assumed"]["mean"] == IMAGENET_DEFAULT_MEAN
    assert "may be DINOv3" in " ".join(model.notes())
    gives(model, DINOV3, state, IMAGENET, **args)
    assert capsys.readouterr().out == ""


def test_siglip_of_open_clip(tmp_path: Path) -> None:
    state = trained(SIGLIP)
    text = {
        "text.token_embedding.weight": torch.zeros(3, 3),
        "logit_scale": torch.zeros(()),
    }
    file = under("visual.trunk.", state) | text | {"logit_bias": torch.zeros(())}
    model = loaded(saved(tmp_path / "siglip.pth", file), SIGLIP)
    assert model.weights["layout"] == "SigLIP"
    transform = model.transform
    assert (transform["mean"], transform["std"]) == HALF
    assert (transform["crop_pct"], transform["crop_mode"]) == (1.0, "squash")
    assert model.weights["assumed"]["mean"] == HALF[0]
    gives(model, SIGLIP, state, HALF)


def test_files_of_other_libraries_are_refused_in_a_line(tmp_path: Path) -> None:
    """As transformers names SigLIP's and DINOv3's tensors."""
    names = ("vision_model.embeddings.patch_embedding.weight", "vision_model.head.probe")
    path = saved(tmp_path / "hf.pth", {name: torch.zeros(2, 2) for name in names})
    for name in (SIGLIP, DINOV3):
        with pytest.raises(
            ModelError, match=r"hf\.pth does not fit this model: missing: \d+"
        ):
            loaded(path, name)

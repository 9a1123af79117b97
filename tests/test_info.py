"""vitsee info: what a user and a script learn about a store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vitsee_cli.main import main

MakeStore = Callable[..., Path]


def info(*args: object) -> Result:
    return CliRunner().invoke(main, ["info", *map(str, args)])


def test_for_people(make_store: MakeStore) -> None:
    result = info(make_store())
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for part in (
        "tiny",
        "10 images",
        "3 of 3 slabs",
        "complete",
        "blocks.1.out",
        "7x4",
        "= blocks.0.out",  # the alias
        "2x3",
        "attention",
        "2 blocks",
        "residual",
        "1 sublayer",
        "vitsee extract tiny",
    ):
        assert part in result.stdout, part


def test_for_scripts(make_store: MakeStore) -> None:
    store = make_store()
    everything = json.loads(info(store, "--json").stdout)
    assert everything["complete"] is True
    assert info(store, "-f", "complete").stdout == "true\n"
    assert info(store, "-f", "model.name").stdout == "tiny\n"
    assert info(store, "-f", "store_id").stdout == everything["store_id"] + "\n"
    assert json.loads(info(store, "-f", "model").stdout) == everything["model"]
    assert info(store, "-f", "class_names.1").stdout == "odd\n"


@pytest.mark.parametrize("field", ["modle", "model.nam", "class_names.7", "model.name.x", ""])
def test_unknown_field(make_store: MakeStore, field: str) -> None:
    result = info(make_store(), "-f", field)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"no field {field!r}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_unknown_field_suggests(make_store: MakeStore) -> None:
    assert "model" in info(make_store(), "-f", "modle").stderr


def test_unfinished_store(make_store: MakeStore) -> None:
    store = make_store(slabs=[0, 2])
    result = info(store)
    assert result.exit_code == 0
    assert "2 of 3 slabs" in result.stdout
    assert "unfinished" in result.stdout
    assert info(store, "-f", "complete").stdout == "false\n"


def test_store_without_any_slab(make_store: MakeStore) -> None:
    result = info(make_store(slabs=[]))
    assert result.exit_code == 0
    assert "0 of 3 slabs" in result.stdout


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.zarr").write_text("x")
    for name in ("missing.zarr", "folder", "file.zarr"):
        for more in ([], ["--json"], ["-f", "complete"]):
            result = info(tmp_path / name, *more)
            assert result.exit_code == 1
            assert result.stdout == ""
            assert len(result.stderr.splitlines()) == 1
            assert name in result.stderr


def test_one_format_at_a_time(make_store: MakeStore) -> None:
    result = info(make_store(), "--json", "-f", "model")
    assert result.exit_code == 2
    assert result.stdout == ""


def test_imports_no_models_and_no_pictures(make_store: MakeStore) -> None:
    code = (
        "import sys\n"
        "from vitsee_cli.main import main\n"
        f"main(['info', {str(make_store())!r}], standalone_mode=False)\n"
        "print([m for m in ('torch', 'timm', 'matplotlib', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

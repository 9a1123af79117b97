"""A signal at any moment of `vitsee extract`: one exit code, one line, nothing half-made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.extractions import VIT, extract, plant_images
from vitsee_cli import signals
from vitsee_cli.commands import extract as extract_command
from vitsee_cli.main import main
from vitsee_core.extraction import run
from vitsee_core.extraction.outcome import Interrupted, StopRequest
from vitsee_core.extraction.sharding import Shard
from vitsee_stores import StoreWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), 8)


def stopped_at(
    module: str, sent: signal.Signals, *args: object
) -> tuple[int, str, list[str]]:
    """`vitsee ARGS` in a process that gets a signal once it has imported `module`; its exit code,
    stdout, and what it said on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "vitsee_cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("import time:") and line.rpartition("|")[2].strip() == module:
            process.send_signal(sent)
            break
    out, said = process.communicate(timeout=120)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    return process.returncode, out, lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "sent"),
    [
        (
            "difflib",
            signal.SIGTERM,
        ),  # the first that is imported after the program's first lines
        ("torch._C", signal.SIGINT),  # half-way through torch
        ("vitsee_core.models.selfcheck", signal.SIGTERM),
    ],
)
def test_before_anything_is_stored(
    module: str, sent: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    code, out, lines = stopped_at(
        module, sent, "extract", *VIT, "--data", folder, "-o", path
    )
    assert code == 75, lines
    assert lines == [
        f"vitsee extract: stopped by {sent.name} before its first slab: nothing is stored yet by "
        "this run; repeat the command"
    ]
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_before_the_first_handler() -> None:
    """Each module would be milliseconds in which Ctrl-C prints a traceback; `re` is imported by
    the script that pip writes."""
    code = "import re, sys; before = {*sys.modules}; import vitsee_cli.__main__; "
    code += "print(*sorted({*sys.modules} - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    own = ["vitsee_cli", "vitsee_cli.__main__", "vitsee_cli.signals"]
    assert done.stdout.split() == ["__future__", "signal", *own]


@pytest.mark.parametrize(
    ("sent", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_other_commands_end_as_a_shell_expects(
    sent: signal.Signals, expected: int, tmp_path: Path
) -> None:
    code, out, lines = stopped_at(
        "click", sent, "-q", "attn-dist", tmp_path / "none.zarr"
    )
    assert (code, out, lines) == (expected, "", ["vitsee attn-dist: interrupted"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_of_a_command_that_has_ended_stands(sent: signal.Signals) -> None:
    """Closing down takes a moment once torch was imported."""
    code = (
        "import atexit, os, sys; sys.argv = ['vitsee', '--version']; "
        f"atexit.register(os.kill, os.getpid(), {int(sent)}); "
        "from vitsee_cli.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shard", "others"),
    [
        (Shard(), ""),
        (Shard(1, 3), " until now (other processes with --shard go on)"),
        (Shard(claims=True), " until now (other processes with --shard go on)"),
    ],
)
def test_others_may_commit_more(
    shard: Shard, others: str, make_store: Callable[..., Path]
) -> None:
    writer = StoreWriter.join(make_store(slabs=[0, 2]))
    assert writer is not None
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    line = str(run.stopped(stop, writer, shard.others))
    expected = (
        f"stopped by SIGTERM with 2 of 3 slabs committed{others}; repeat the command"
    )
    assert line.startswith(expected)


@pytest.mark.slow
def test_while_the_store_is_made_the_signal_waits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left beside the store, and what was created is gone on with."""
    create = StoreWriter.create_or_join

    def slowly(*args: object, **kwargs: object) -> StoreWriter:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return create(*args, **kwargs)  # type: ignore[arg-type]

    path = tmp_path / "store.zarr"
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(StoreWriter, "create_or_join", slowly)
    result = extract(*VIT, "--data", folder, "-o", path, "--slab", 4)
    assert result.exit_code == 75, result.output
    assert "stopped by SIGTERM with 0 of 2 slabs committed; repeat" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["store.zarr"]
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.undo()
    assert extract(*VIT, "--data", folder, "-o", path, "--slab", 4).exit_code == 0


@pytest.mark.slow
def test_a_signal_after_the_last_batch_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StoreWriter.write_slab

    def and_signal(writer: StoreWriter, k: int, *args: object) -> int:
        size = write(writer, k, *args)  # type: ignore[arg-type]
        if k == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return size

    monkeypatch.setattr(StoreWriter, "write_slab", and_signal)
    path = tmp_path / "store.zarr"
    assert extract(*VIT, "--data", folder, "-o", path, "--slab", 4).exit_code == 0
    assert StoreWriter.join(path).complete  # type: ignore[union-attr]


def test_an_exception_on_the_way_is_75_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the group runs inside another program, signals are exceptions."""

    def stop(*_args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(run, "prepare", stop)
    result = CliRunner().invoke(
        main, ["extract", *VIT, "--data", str(folder), "-o", str(tmp_path / "store.zarr")]
    )
    assert result.exit_code == 75
    assert result.stderr == "vitsee extract: interrupted; repeat the command\n"


def test_what_a_second_signal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once slabs are made, the line is another one."""
    monkeypatch.setattr(signals, "_resume_line", "")
    extract_command.SlabReporter("x").start(8)
    assert "committed slabs are kept" in signals._resume_line
    assert Interrupted.exit_code == signals.EXIT_RESUMABLE == 75

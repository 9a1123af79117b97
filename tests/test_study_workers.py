"""Steps of a study several at a time: in which order, with which results, and how that ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from tests.command_line import invoke as vitsee
from tests.command_line import said
from vitsee_cli import console, performing
from vitsee_cli.main import main
from vitsee_cli.performing import RESUME_LINE, Performer, Workers, n_workers
from vitsee_core.runtime import machine
from vitsee_core.study.record import DONE, LEFT_OUT, Record
from vitsee_core.study.running import Outcome, Stopped, carry_out
from vitsee_core.study.steps import Step

# ------------------------------------------------------------------------------------ the order


class Together:
    """Two steps at a time, that of `last_first` ends the younger first; `here`: not taken."""

    def __init__(self, *here: str, last_first: bool = False, n: int = 2) -> None:
        self.here, self.last_first, self.n = here, last_first, n
        self.log: list[str] = []
        self.busy: list[Step] = []
        self.fails: dict[str, Outcome] = {}

    def takes(self, step: Step) -> bool:
        return step.name not in self.here

    def free_for(self, step: Step) -> bool:
        return len(self.busy) < self.n

    def begin(self, step: Step) -> None:
        self.log.append(f"+{step.name}")
        self.busy.append(step)

    def ended(self) -> tuple[str, Outcome]:
        step = self.busy.pop(-1 if self.last_first else 0)
        self.log.append(f"-{step.name}")
        outcome = self.fails.get(step.name, Outcome(0))
        for path in step.outputs if not outcome.code else ():
            path.write_text(step.name)
        return step.name, outcome


def made(folder: Path, name: str, *after: str, command: str = "cka") -> Step:
    inputs = tuple(folder / one for one in after or ("store",))
    return Step(name, (command, name), inputs, (folder / name,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").write_text("")
    return tmp_path


def run(
    folder: Path, steps: Sequence[Step], workers: Together, lines: list[str] | None = None
) -> list[Step]:
    def here(step: Step) -> Outcome:
        workers.log.append(step.name)
        for path in step.outputs:
            path.write_text(step.name)
        return Outcome(0)

    say = (lines if lines is not None else []).append
    return carry_out(steps, Record.read(folder), here, say, workers=workers)


def test_a_step_waits_for_what_it_reads_and_the_last_for_all(folder: Path) -> None:
    page = Step("report", ("report",), (), (folder / "report.html",))
    steps = [
        made(folder, "a"),
        made(folder, "b", "a"),
        made(folder, "c"),
        made(folder, "d"),
        page,
    ]
    workers, lines = Together(), list[str]()
    assert run(folder, steps, workers, lines) == []
    assert workers.log == [
        "+a",
        "+c",
        "-a",
        "+b",
        "-c",
        "+d",
        "-b",
        "-d",
        "+report",
        "-report",
    ]
    assert [line.partition(":")[0] for line in lines] == [
        "[1/5] a",
        "[2/5] c",
        "[3/5] b",
        "[4/5] d",
        "[5/5] report",
    ]
    record = json.loads((folder / "study.json").read_text())["steps"]
    assert [*record] == ["a", "b", "c", "d", "report"], "in the plan's order"
    assert {entry["status"] for entry in record.values()} == {DONE}
    again = Together()
    assert run(folder, steps, again) == [] and again.log == []


def test_the_longest_begins_first(folder: Path) -> None:
    """As the record has it; what was never timed, by the size of its table."""
    steps = [made(folder, "a"), made(folder, "b"), made(folder, "c", command="pca")]
    workers = Together(n=1)
    run(folder, steps, workers)
    assert workers.log[::2] == ["+c", "+a", "+b"]
    record = Record.read(folder)
    record.steps["b"].seconds, record.steps["c"].seconds = 9.0, 3.0
    for step in steps:
        record.outdate(step)
    record.write()
    again = Together(n=1)
    run(folder, steps, again)
    assert again.log[::2] == ["+b", "+c", "+a"]


def test_what_no_worker_takes_is_done_here_while_they_rest(folder: Path) -> None:
    steps = [
        made(folder, "a"),
        made(folder, "b"),
        made(folder, "here"),
        made(folder, "c", "here"),
    ]
    workers = Together("here")
    run(folder, steps, workers)
    assert workers.log == ["+a", "+b", "-a", "-b", "here", "+c", "-c"]


def test_a_failure_costs_what_reads_it_alone(folder: Path) -> None:
    steps = [
        made(folder, "a"),
        made(folder, "b", "a"),
        made(folder, "c"),
        made(folder, "d"),
    ]
    for last_first in (False, True):
        workers, lines = Together(last_first=last_first), list[str]()
        workers.fails["a"] = Outcome(1, "no such thing")
        failed = run(folder, steps, workers, lines)
        assert [step.name for step in failed] == ["a", "b"]
        assert {"+b", "-b"}.isdisjoint(workers.log)
        assert any(line.endswith("] b: left out: a was not made") for line in lines)
        record = json.loads((folder / "study.json").read_text())["steps"]
        assert record["b"]["status"] == LEFT_OUT and record["d"]["status"] == DONE
        (folder / "study.json").unlink()


def test_a_signal_to_a_worker_ends_the_study(folder: Path) -> None:
    workers = Together()
    workers.fails["a"] = Outcome(143, "interrupted")
    with pytest.raises(Stopped):
        run(folder, [made(folder, "a"), made(folder, "b"), made(folder, "c")], workers)
    assert workers.log == ["+a", "+b", "-a"]


@pytest.mark.parametrize(
    ("cores", "memory", "budget", "n"),
    [
        (1, 64 << 30, None, 1),
        (2, 64 << 30, None, 2),
        (64, 64 << 30, None, 3),  # a quarter each, and a quarter for others
        (64, 64 << 30, 1 << 30, 8),
        (64, 16 << 30, 5 << 30, 2),  # two of 6 GiB
        (2, 16 << 30, 16 << 30, 1),
        (4, 2 << 30, None, 1),
    ],
)
def test_how_many_by_cores_and_memory(
    cores: int, memory: int, budget: int | None, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: cores)
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory)
    assert n_workers(None, budget) == n and n_workers(5, budget) == 5


def test_together_they_take_no_more_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    for name in (*machine.THREADS, machine.SHARED_BY):
        monkeypatch.delenv(name, raising=False)
    environ = machine.shared_by(3, {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "16"})
    assert environ == {
        "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1",
        "POLARS_MAX_THREADS": "2", machine.SHARED_BY: "3",
    }  # fmt: skip
    monkeypatch.setenv(machine.SHARED_BY, environ[machine.SHARED_BY])
    assert machine.n_cores() == 2
    assert machine.shared_by(2, environ)[machine.SHARED_BY] == "6"


# ------------------------------------------------------------------------------------ processes


SOME = ("attn-dist", "cka", "probe", "best-layer", "spectrum")
WORDS = ["study", "demo:vit", "--data", "demo:test", "--images", "24", "-o", "out"]
WORDS += [word for name in SOME for word in ("--analyses", name)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study whose steps were performed one after the other."""
    place = tmp_path_factory.mktemp("alone")
    said(place, *WORDS, "--jobs", "1")
    return place / "out"


def store_of(alone: Path, place: Path) -> Path:
    """A study with the store of that one, and none of its results."""
    folder = place / "out"
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "results")
    (folder / "report.html").unlink()
    record = json.loads((folder / "study.json").read_text())
    record["steps"] = {"extract-vit": record["steps"]["extract-vit"]}
    (folder / "study.json").write_text(json.dumps(record))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    results = sorted((folder / "results").iterdir())
    return {
        path.name: path.read_bytes()
        for path in results
        if path.suffix in (".csv", ".png")
    }


def record_of(folder: Path) -> dict[str, object]:
    """`study.json` without times and the option."""
    found = json.loads((folder / "study.json").read_text())
    for entry in found["steps"].values():
        entry.pop("seconds")
    found["steps"]["report"].pop("outputs")
    found.pop("command")
    return dict(found)


@pytest.mark.slow
def test_one_or_two_at_a_time_make_the_same(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store_of(alone, tmp_path)
    monkeypatch.chdir(tmp_path)
    done = vitsee(*WORDS, "--jobs", "2")
    assert done.exit_code == 0 and done.stdout == "out/report.html\n", done.output
    assert contents(alone) == contents(folder) and len(contents(folder)) == 2 * len(SOME)
    assert record_of(alone) == record_of(folder)
    assert [*record_of(alone)["steps"]] == [*record_of(folder)["steps"]]  # type: ignore[misc]
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert lines[0] == "[1/7] extract-vit: done before"
    assert lines[-1].startswith("[7/7] report: ")
    assert vitsee(*WORDS, "--jobs", "2").stderr.count("done before") == 6


def in_a_study(verbosity: int = 0) -> Performer:
    root = click.Context(main, info_name="vitsee")
    command = main.get_command(root, "study")
    assert command is not None
    console.setup(verbosity)
    return Performer(click.Context(command, parent=root, info_name="study"))


@contextmanager
def workers_of(n: int) -> Iterator[Workers]:
    workers = Workers(in_a_study(), {}, n)
    try:
        yield workers
    finally:
        workers.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_one_more_try(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other goes on meanwhile."""
    store = alone / "stores" / "vit.zarr"

    def step(name: str) -> Step:
        table = tmp_path / f"{name}.csv"
        line = ("spectrum", str(store), "-o", str(table), "--force")
        return Step(name, line, (store,), (table,))

    with workers_of(2) as workers:
        for name in "ab":
            workers.begin(step(name))
        assert not workers.free_for(step("c"))
        workers._workers[0].process.kill()
        assert [workers.ended() for _ in "ab"] == [("b", Outcome(0)), ("a", Outcome(0))]
        assert capsys.readouterr().err == (
            "warning: a: its process ended early (SIGKILL), as when memory runs out; it is "
            "performed again when the others have ended\n"
        )
        workers.begin(step("a"))
        for worker in workers._workers:
            if worker.step is not None:
                worker.process.kill()
        name, outcome = workers.ended()
        assert (name, outcome.code) == ("a", 1)
        assert outcome.reason.startswith(
            "its process ended early (SIGKILL), as when memory runs"
        )
        assert outcome.reason.endswith(f"; run it by itself: {step('a').line}")
        workers.begin(step("b"))
        began = time.monotonic()
    assert time.monotonic() - began < performing.SECONDS_TO_END, "it stopped at once"
    assert {path.name for path in tmp_path.iterdir()} <= {
        f"{name}.csv{ending}" for name in "ab" for ending in ("", ".json")
    }


@pytest.mark.parametrize("gpu", [False, True])
def test_steps_that_may_use_a_gpu_wait_for_each_other(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "may_have_gpu", lambda: gpu)
    store = (Path("a.zarr"),)
    probes = [Step(name, ("probe", "a.zarr"), store, (Path(name),)) for name in "ab"]
    other = Step("c", ("spectrum", "a.zarr"), store, (Path("c"),))
    extraction = Step("d", ("extract", "demo:vit"), (), store)
    printed, page = (
        Step("e", ("info", "a.zarr")),
        Step("f", ("report", "."), (), (Path("f"),)),
    )
    workers = Workers(in_a_study(), {}, 3)
    workers._workers = [SimpleNamespace(step=probes[0])]  # type: ignore[list-item]
    assert workers.free_for(probes[1]) is not gpu and workers.free_for(other)
    assert [workers.takes(step) for step in (other, extraction, printed, page)] == [
        True, False, False, True,
    ]  # fmt: skip
    workers._workers = []
    assert workers.takes(other) and not workers.takes(page), (
        "the page alone starts no process"
    )


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


def commands(pids: Sequence[int]) -> list[int]:
    """Those that perform steps: spawned, and none that ended."""

    def words(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    return [pid for pid in pids if b"spawn_main" in words(pid)]


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs Linux' list of children"
)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_stopped_leaves_no_process_and_goes_on(
    alone: Path, tmp_path: Path, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT reaches all of its processes, as a terminal sends it; the others that of the study."""
    folder = store_of(alone, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "vitsee_cli", *WORDS, "--jobs", "2"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until(
        lambda: (
            len(commands(children(process.pid))) == 2
            and any(folder.glob("results/*.csv"))
        )
    )
    workers = commands(children(process.pid))
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    until(lambda: not commands(workers))
    assert out == "" and "Traceback" not in err
    if sent is signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 75
        assert err.splitlines()[-1] == f"vitsee study: interrupted; {RESUME_LINE}"
    known = {path.name for path in (alone / "results").iterdir()}
    assert {path.name for path in (folder / "results").iterdir()} <= known, (
        "nothing half-made"
    )
    steps = json.loads((folder / "study.json").read_text())["steps"]
    done = [name for name, step in steps.items() if step["status"] == DONE]
    monkeypatch.chdir(tmp_path)
    again = vitsee(*WORDS, "--jobs", "2")
    assert again.exit_code == 0 and again.stderr.count("done before") == len(done), (
        again.output
    )
    assert contents(folder) == contents(alone)

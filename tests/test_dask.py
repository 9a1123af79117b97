"""`--dask`: the work of every command on a cluster's workers, and what goes wrong with clusters."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

import vitsee_core
import vitsee_stores
from tests.attention_maps import layout, random_attention
from tests.attention_maps import write as write_heads
from tests.clusters import two_workers
from tests.command_line import invoke, one_line
from tests.tables import equal
from vitsee_cli import console
from vitsee_cli.analysis import spread_over
from vitsee_cli.main import CommandGroup, main
from vitsee_core.analyses import attn_dist
from vitsee_core.runtime import dask_map as module
from vitsee_core.runtime.dask_map import DaskMap, dask_map, parse_address
from vitsee_core.runtime.dask_worker import DaskError
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import n_cores
from vitsee_core.runtime.progress import Tally
from vitsee_core.runtime.versions import worker_versions
from vitsee_core.similarity.gram_file import DamagedGram
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput, VitseeError

distributed = pytest.importorskip("distributed")

# Commands that compute nothing from stores, a few numbers (erf, weights), hand out what they hold,
# run a model (head-importance), or run other commands.
WITHOUT = {
    *(
        "best-layer",
        "cache",
        "demo",
        "encode",
        "erf",
        "explore",
        "export",
        "import",
        "findings",
    ),
    *("head-importance", "info", "models", "plot", "report", "rerun", "sites", "study"),
    *("validate", "weights"),
}


@pytest.fixture(scope="module")
def two() -> Iterator[DaskMap]:
    """Two worker processes."""
    with two_workers() as made:
        yield made


def address(made: DaskMap) -> str:
    return str(made.client.scheduler.address)


def commands() -> list[str]:
    assert isinstance(main, CommandGroup)
    return main.list_commands(click.Context(main))


# What workers run: named, as they are unpickled there.


def squared(x: int) -> int:
    time.sleep(0.01 * (x == 0))
    return x * x


def refused(path: Path, x: int) -> int:
    if x == 2:
        raise DamagedGram(path, 3, "cut short")
    return x


def unseen(path: Path, x: int) -> None:
    open_store(path)


def counted(execution: Execution, n: int) -> tuple[int, int, int | None]:
    import logging

    execution.progress.advance(n, 2 * n)
    logging.getLogger("vitsee_core.tests").info("seen %d", n)
    return n, execution.jobs, execution.memory


def killed_once(folder: Path, x: int) -> int:
    if x == 3 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def killed_once_with(data: bytes, folder: Path, x: int) -> int:
    return killed_once(folder, x)


def n_plugins(dask_worker: Any) -> int:
    return len(dask_worker.plugins)


def always_killed(x: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing_twice(folder: Path, x: int) -> int:
    """As what reads over a network may."""
    tried = len(list(folder.glob("tried*")))
    (folder / f"tried{tried}").touch()
    if tried < 2:
        raise ConnectionError("once more")
    return x


def long_bytes(data: bytes, x: int) -> tuple[int, int]:
    return len(data), x


def waiting(folder: Path, x: int) -> int:
    (folder / f"begun{x}").touch()
    while x and not (folder / "go").exists():
        time.sleep(0.01)
    return x


# ------------------------------------------------------------------------------------- the map


def test_results_come_in_order_and_a_bounded_number_ahead(two: DaskMap) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for k in range(40):
            taken.append(k)
            yield k

    results = two(squared, items())
    first = [next(iter(results)) for _ in range(1)]
    assert len(taken) <= 4 * 2 + 1
    assert first + list(results) == [k * k for k in range(40)]


def test_a_large_function_goes_once(two: DaskMap) -> None:
    data = os.urandom(1 << 20)
    sent = two.sent
    assert list(two(partial(long_bytes, data), range(20))) == [
        (1 << 20, k) for k in range(20)
    ]
    assert two.sent - sent < 2.1 * (1 << 20)  # to each of two workers


def test_a_worker_that_comes_later_is_given_a_large_function(
    two: DaskMap, tmp_path: Path
) -> None:
    work = partial(killed_once_with, os.urandom(1 << 20), tmp_path)
    before = set(two.client.run(n_plugins).values())
    assert list(two(work, range(12))) == list(range(12))
    assert (tmp_path / "killed").exists()
    assert set(two.client.run(n_plugins).values()) == before, "it is forgotten at the end"


def test_a_users_mistake_is_the_very_error(two: DaskMap, tmp_path: Path) -> None:
    with pytest.raises(DamagedGram, match=r"x.tiles is cut short \(tile 3\)$") as caught:
        list(two(partial(refused, tmp_path / "x.tiles"), range(5)))
    assert caught.value.path == tmp_path / "x.tiles"


def test_a_store_that_only_this_machine_has(two: DaskMap, tmp_path: Path) -> None:
    """Workers that see other files say so."""
    line = rf"^on the Dask worker at .*: no store at {tmp_path}/a.zarr: nothing is there \(workers"
    with pytest.raises(DaskError, match=line):
        list(two(partial(unseen, tmp_path / "a.zarr"), range(3)))


def test_errors_travel_whatever_their_constructors_take() -> None:
    for error in (
        DamagedGram(Path("a"), 1, "gone"),
        MissingInput("no residuals"),
        VitseeError(),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert again.__dict__ == error.__dict__


def test_what_is_nobodys_mistake_is_tried_again(two: DaskMap, tmp_path: Path) -> None:
    assert list(two(partial(failing_twice, tmp_path), [7])) == [7]
    assert len(list(tmp_path.glob("tried*"))) == 3


@pytest.mark.fault("a Dask worker killed at one task")
def test_a_lost_workers_work_is_done_again(two: DaskMap, tmp_path: Path) -> None:
    assert list(two(partial(killed_once, tmp_path), range(12))) == list(range(12))
    assert (tmp_path / "killed").exists()


def test_work_that_ends_every_worker(two: DaskMap) -> None:
    with pytest.raises(DaskError, match="one piece of the work ended 4 workers"):
        list(two(always_killed, [0]))


def test_what_is_left_is_cancelled(two: DaskMap, tmp_path: Path) -> None:
    """Of 8 tasks that are handed out and wait, two have begun; each worker may begin another
    before it hears of the end. What is handed out later runs after all of them."""
    results = iter(two(partial(waiting, tmp_path), range(100)))
    try:
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        end = time.monotonic() + 60
        while any(two.client.processing().values()) and time.monotonic() < end:
            time.sleep(0.1)  # a busy machine's scheduler hears of the end late
    finally:
        (tmp_path / "go").touch()
    assert list(two(squared, range(4))) == [0, 1, 4, 9]
    assert len(list(tmp_path.glob("begun*"))) <= 1 + 2 + 2


def test_spread_passes_progress_and_remarks_on(
    two: DaskMap, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Tally()
    execution = Execution(memory=1 << 20, jobs=5, map=two, progress=seen)
    with caplog.at_level("INFO", "vitsee_core"):
        found = list(execution.spread(counted, [3, 4]))
    # One thread each, and half of the budget: the workers share this machine.
    assert found == [(3, 1, 1 << 19), (4, 1, 1 << 19)]
    assert (seen.count, seen.size_bytes) == (7, 14)
    assert [record.getMessage() for record in caplog.records] == ["seen 3", "seen 4"]
    alone = Execution(memory=1 << 20, jobs=5, progress=(here := Tally()))
    assert list(alone.spread(counted, [3, 4])) == [(3, 5, 1 << 20), (4, 5, 1 << 20)]
    assert here.count == 7


def test_a_fold_is_equal_to_the_bit_and_moves_little(
    two: DaskMap, tmp_path: Path
) -> None:
    store = write_heads(
        tmp_path / "a.zarr", [random_attention(layout(), 48, (2, 2))], slab=8
    )
    sent, received = two.sent, two.received
    found, expected = attn_dist.run(store, map=two), attn_dist.run(store)
    assert equal(found, expected)
    assert two.sent - sent < 20_000 and two.received - received < 50_000


# ---------------------------------------------------------------------------------- the cluster


def test_addresses() -> None:
    assert parse_address("local:3") == 3 and parse_address("local") == n_cores()
    for text in (
        "tcp://10.0.0.7:8786",
        "tls://[::1]:1",
        "node7.cluster:8786",
        "localhost:1",
    ):
        assert parse_address(text) == text
    for text in ("local:0", "local:x", "node7", "", "tcp://", "local:-1", "http//x:y"):
        with pytest.raises(
            DaskError, match=r"expected local:N .* or a scheduler's address"
        ):
            parse_address(text)


@pytest.mark.slow
def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.5)
    write_heads(tmp_path / "a.zarr", [random_attention(layout(), 8, (2, 2))])
    line = one_line("attn-dist", tmp_path / "a.zarr", "--dask", "tcp://127.0.0.1:1")
    assert "attn-dist: no Dask scheduler answers at tcp://127.0.0.1:1" in line
    line = one_line("attn-dist", tmp_path / "a.zarr", "--dask", "local:none", code=2)
    assert "expected local:N" in line


@pytest.mark.slow
def test_no_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(module, "WORKER_SECONDS", 1.5)
    cluster = distributed.LocalCluster(
        n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    )
    with (
        cluster,
        pytest.raises(DaskError, match="had no workers for 2 s; start some"),
        dask_map(cluster.scheduler_address),
    ):
        pass
    assert [r.getMessage() for r in caplog.records if "no workers yet" in r.getMessage()]


def test_other_versions() -> None:
    ours = dict(worker_versions())

    class Client:
        def run(self, function: Any, on_error: str) -> dict[str, Any]:
            assert (function(), on_error) == (ours, "return")
            return answers

        def nthreads(self) -> dict[str, int]:
            return dict.fromkeys(answers, 1)

        def submit(self, *given: Any, **how: Any) -> Future[bytes]:
            failed: Future[bytes] = Future()
            failed.set_exception(TypeError("done() takes 2 positional arguments"))
            return failed

    made = DaskMap(Client(), "tcp://s:1")
    answers: dict[str, Any] = {"tcp://w:1": ours}
    made.check_versions()
    answers = {"tcp://v:1": ours, "tcp://w:1": {**ours, "torch": "0.1", "numpy": "1.0"}}
    with pytest.raises(
        DaskError, match=r"w:1 has numpy 1\.0, torch 0\.1; here: numpy .* \(start"
    ):
        made.check_versions()
    answers = {"tcp://w:1": ModuleNotFoundError("No module named 'vitsee_core'")}
    with pytest.raises(
        DaskError, match=r"cannot run vitsee .*No module named 'vitsee_core'"
    ):
        made.check_versions()
    with pytest.raises(DaskError, match="cannot run vitsee"):
        list(made(squared, [1]))
    answers = {"tcp://w:1": ours}
    with pytest.raises(TypeError, match="2 positional"):
        list(made(squared, [1]))


class _EndsAfterTheWait(Future[bytes]):
    """A task that ends just after the first wait for it has run out."""

    def __init__(self, outcome: bytes | Exception) -> None:
        super().__init__()
        self._outcome = outcome

    def result(self, timeout: float | None = None) -> bytes:
        if self.done():
            return super().result(timeout)
        if isinstance(self._outcome, bytes):
            self.set_result(self._outcome)
        else:
            self.set_exception(self._outcome)
        raise TimeoutError


def test_a_task_that_ends_just_after_the_wait_has_its_own_outcome() -> None:
    dask = DaskMap(client=None, address="tcp://s:1")
    assert dask._wait_for(_EndsAfterTheWait(b"done")) == b"done"
    with pytest.raises(KeyError, match="of the task"):
        dask._wait_for(_EndsAfterTheWait(KeyError("of the task")))
    with pytest.raises(TimeoutError, match="of the task"):
        dask._wait_for(_EndsAfterTheWait(TimeoutError("of the task")))


@contextmanager
def worker_of(folder: Path, scheduler: str) -> Iterator[str]:
    """A worker that imports from `folder` first: its name."""
    name = f"worker of {folder.name}"
    words = [scheduler, "--nthreads", "4", "--no-nanny", "--name", name]
    path = os.pathsep.join([str(folder), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_worker", *words, "--no-dashboard"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield name
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_a_worker_of_other_code_that_joins_during_the_work(tmp_path: Path) -> None:
    """A checkout of the same version with a changed line."""
    folder = tmp_path / "checkout"
    for package in (vitsee_core, vitsee_stores):
        (source,) = package.__path__
        shutil.copytree(
            source, folder / Path(source).name, ignore=shutil.ignore_patterns("*.npz")
        )
    changed = folder / "vitsee_core" / "__init__.py"
    changed.write_text(changed.read_text() + "# changed")
    with two_workers() as made, ExitStack() as stack:

        def items() -> Iterator[int]:
            yield from range(3)
            name = stack.enter_context(worker_of(folder, address(made)))
            made.client.wait_for_workers(3, timeout=300)
            workers = made.client.scheduler_info(n_workers=-1)["workers"]
            names.update({w["name"]: where for where, w in workers.items()})
            assert name in names
            yield from range(2_000)

        names = dict[str, str]()
        with pytest.raises(DaskError) as caught:
            list(made(squared, items()))
    ours = worker_versions()["vitsee's code"]
    where = re.escape(names["worker of checkout"])
    assert re.fullmatch(
        rf"the Dask worker at {where} has vitsee's code (?!{ours})\w+; here: vitsee's code {ours} "
        r"\(start workers from the same environment\)",
        str(caught.value),
    )


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = r"run: pip install 'vitsee\[dask\]'"
    with pytest.raises(DaskError, match=line), dask_map("local:1"):
        pass


def test_processes_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk."""

    def full(**_: Any) -> None:
        raise RuntimeError(
            "Cluster failed to start: [Errno 28] No space left on device: '/tmp/x'"
        )

    monkeypatch.setattr("distributed.LocalCluster", full)
    line = "no Dask processes on this machine: Cluster failed to start: .*No space left on device"
    with pytest.raises(DaskError, match=line), dask_map("local:1"):
        pass


# --------------------------------------------------------------------------------- the commands


def test_progress_says_by_how_many_workers(
    two: DaskMap, capsys: pytest.CaptureFixture[str]
) -> None:
    console.setup(0)
    two.client.wait_for_workers(2, timeout=60)  # other tests kill some
    reporter = console.Reporter("vitsee x", show_after=0, line_interval=0)
    with spread_over(address(two), reporter) as own:
        assert isinstance(own["map"], DaskMap)
        reporter.start(4)
        reporter.advance(1)
        reporter.stop()
    assert re.search(
        r"vitsee x: 1/4 images, .* left, 2 workers\n", capsys.readouterr().err
    )


@pytest.mark.slow
def test_processes_of_this_machine(tmp_path: Path) -> None:
    """Nobody else on the machine can reach them."""
    store = write_heads(
        tmp_path / "a.zarr", [random_attention(layout(), 16, (2, 2))], slab=8
    )
    with dask_map("local:1") as alone:
        assert (alone.local, alone.n_threads(), alone.n_workers()) == (1, 1, 1)
        assert address(alone).startswith("tls://127.0.0.1:")
        assert equal(attn_dist.run(store, map=alone), attn_dist.run(store))


@pytest.mark.parametrize("name", sorted(set(commands()) - WITHOUT))
def test_every_command_takes_it(name: str) -> None:
    assert isinstance(main, CommandGroup)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert "--dask" in {option for p in command.params for option in p.opts}


def test_a_mistake_on_a_worker_is_one_line(two: DaskMap, tmp_path: Path) -> None:
    """A chunk that is damaged is found by the worker that reads it."""
    path = tmp_path / "a.zarr"
    write_heads(path, [random_attention(layout(), 48, (2, 2))], slab=8)
    chunk = next((path / "attention" / "distance_px").glob("c.3*"))
    chunk.write_bytes(chunk.read_bytes()[:-9] + bytes(9))
    result = invoke("attn-dist", path, "--dask", address(two))
    assert result.exit_code == 1 and result.stdout == ""
    last = result.stderr.rstrip("\n").splitlines()[-1]
    assert last.startswith("vitsee attn-dist: ") and "damaged" in last

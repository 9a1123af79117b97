"""How many trials of each fault, from which seeds; and extractions that trials disturb.

`make test-all` does few, `make faults` many: VITSEE_TRIALS times as many as a test asks for. A
test's name ends in its seed, so that `VITSEE_SEED=7 pytest tests/faults -k seed7` does that trial
again: the same choices, but for moments, which depend on the machine too.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.extractions import VIT, array_bytes
from tests.processes import Ended, Process
from tests.random_stores import leftovers
from vitsee_stores import IncompleteStore, StoreWriter, open_store, validate

TRIALS = int(os.environ.get("VITSEE_TRIALS", "1"))
FIRST = int(os.environ.get("VITSEE_SEED", "0"))

N, SLAB = 24, 2


def seeds(n: int) -> pytest.MarkDecorator:
    """A trial for each of `n` seeds, and so many more in `make faults`."""
    chosen = range(FIRST, FIRST + n * TRIALS)
    return pytest.mark.parametrize("seed", chosen, ids=lambda seed: f"seed{seed}")


def extraction(images: Path, store: object, *more: object) -> list[object]:
    """The words of an extraction in twelve slabs."""
    given = {"--slab": SLAB, "--batch-size": 2, "--workers": 0}
    own = [word for pair in given.items() if pair[0] not in more for word in pair]
    return ["extract", *VIT, "--data", images, "-o", store, *own, *more]


def n_committed(store: Path) -> int:
    folder = store / "commits"
    return len(list(folder.glob("c.*.0"))) if folder.is_dir() else 0


def changed(look: Callable[[], object]) -> Callable[[], bool]:
    """Whether what `look` sees is no longer what it sees now."""
    before = look()
    return lambda: look() != before


def moment(
    rng: random.Random, process: Process, seconds: float, begun: Callable[[], bool]
) -> None:
    """Wait for a random moment of a process that takes so many seconds: half the time any, half the
    time soon after `begun`."""
    until = time.monotonic() + 60
    if rng.random() < 0.5:
        until = time.monotonic() + rng.uniform(0, seconds)
        while time.monotonic() < until and process.running():
            time.sleep(0.005)
        return
    while not begun() and time.monotonic() < until and process.running():
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.2))


def ends_well(done: Ended) -> Ended:
    assert done.code == 0, done.stderr
    return done


def killed(process: Process, ended: Callable[[str], None], how: str = "resumed") -> bool:
    """Kill a process; whether it still ran, which is noted as `how`."""
    was_running = process.kill().code == -signal.SIGKILL
    ended(how if was_running else "ended before the signal")
    return was_running


def says_one_line(done: Ended) -> str:
    """The line of a failure that a user can mend; the test fails where it is none."""
    assert done.code == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert re.match(r"vitsee [a-z-]+: ", line), done.stderr
    return line


def check_unfinished(path: Path, whole: dict[str, bytes]) -> None:
    """What is committed is right, and nothing reads as whole that is not."""
    if not path.exists():
        return
    writer = StoreWriter.join(path)
    assert writer is not None
    if writer.complete:
        return
    with pytest.raises(IncompleteStore):
        open_store(path)
    assert validate(path, deep=True) == []
    committed = {str(k) for k in writer.committed().nonzero()[0]}
    found = array_bytes(path)
    for name, data in whole.items():
        folder, _, chunk = name.rpartition("/")
        if folder.startswith(("samples", "weights")) or chunk.split(".")[1] in committed:
            assert found[name] == data, name


def check_all_finish(
    processes: Sequence[Process], path: Path, whole: dict[str, bytes]
) -> None:
    """All end well, and their store is as `check_finished` asks."""
    for process in processes:
        ends_well(process.end())
    check_finished(path, whole)


def check_finished(path: Path, whole: dict[str, bytes]) -> None:
    """The store of one undisturbed process, byte for byte, and nothing beside it."""
    assert open_store(path).complete
    assert validate(path, deep=True) == []
    assert array_bytes(path) == whole
    assert leftovers(path) == []
    assert not list(path.rglob(".claim*"))

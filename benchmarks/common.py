"""What the benchmarks share: the machine's line, interleaved timing, peak memory of a command, and
the results that docs/performance.md is made of.

A benchmark ends with

    if args.record:
        record("knn", "Nearest neighbours, 4,000 images among 20,000", rows)

with `add_record_option(parser)` before: results are kept only where they are meant to be.
`python benchmarks/page.py` then writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

PAUSE = 0.2  # seconds
RESULTS = Path(__file__).parent / "results"
# Variables that a result depends on.
VARIABLES = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "ONEDNN_MAX_CPU_ISA")
OWN = ("--folder", "--pair", "--remark")  # options whose values are the reader's own
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
)  # that matter to products
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def machine() -> str:
    """One line: processor and which of `FLAGS` it has, cores this process may use, Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        found = {name.strip(): value.strip() for name, _, value in lines}
        has = (found.get("flags") or found.get("Features", "")).split()
        flags = " ".join(flag for flag in FLAGS if flag in has)
        model = found.get("model name", model) + (f" ({flags})" if flags else "")
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    found: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each side over `repeats` rounds A B A B ...; a side may return its own seconds, as
    a float. What it returns else is put into `found`. Before each side the threads of the one
    before have time to fall asleep: OpenBLAS's keep a core busy for a tenth of a second after their
    last product."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(warmup + repeats):
        for name, run in sides.items():
            time.sleep(PAUSE)
            began = time.perf_counter()
            own = run()
            spent = own if isinstance(own, float) else time.perf_counter() - began
            if found is not None and own is not spent:
                found[name] = own
            if round_ >= warmup:
                seconds[name].append(spent)
    return seconds


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over rounds of a/b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


class Usage(NamedTuple):
    """What a process took: seconds of the clock and of the processor, and the peak of its resident
    bytes (its own, or of one it waited for)."""

    seconds: float
    cpu: float
    rss: int


def usage_of(command: Sequence[str]) -> Usage:
    """What `command` takes, imports included.

    Raises:
        RuntimeError: it fails.
    """
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit {status}: {said.decode()[-500:]}")
    seconds = time.perf_counter() - began
    return Usage(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def peak_rss(command: Sequence[str]) -> int:
    """Peak resident bytes of the largest process of `command` (itself or one it waited for)."""
    return usage_of(command).rss


class Result(NamedTuple):
    """One line of a benchmark's table.

    what: what was measured, and against what ("a Gram pass, reading included, against the best
    GEMM"). ours, other: medians in `unit`; other is None where there is nothing beside. ratio: how
    much better ours is, 2 where it is twice as fast or takes half the memory; the median over
    rounds, see `paired_ratio`. unit: "s", "ms", "MB", "G/s", ...
    """

    what: str
    ours: float | None
    other: float | None
    ratio: float | None
    unit: str

    @classmethod
    def of(
        cls,
        what: str,
        seconds: Mapping[str, Sequence[float]],
        ours: str,
        other: str,
        unit: str = "s",
    ) -> Result:
        """Two sides of `interleaved`."""
        own, theirs = seconds[ours], seconds[other]
        medians = statistics.median(own), statistics.median(theirs)
        return cls(what, *medians, paired_ratio(theirs, own), unit)


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """--record, for `record`."""
    parser.add_argument(
        "--record", action="store_true", help="keep the results in benchmarks/results"
    )


def record(name: str, title: str, rows: Sequence[Result], folder: Path = RESULTS) -> Path:
    """Keep a benchmark's results in `folder`/NAME.json: machine, date, load, command and rows.

    Numbers are rounded to four digits. The command is this process's, without `--record` and
    without the options in `OWN`.

    Raises:
        ValueError: a name that is no file's, no rows, or a number that is none.
    """
    if not NAME.fullmatch(name) or not rows:
        raise ValueError(f"{name!r} with {len(rows)} rows cannot be recorded")
    fields = {
        "name": name,
        "title": title,
        **about_this_run(),
        "rows": [
            [row.what, *(_rounded(x) for x in (row.ours, row.other, row.ratio)), row.unit]
            for row in rows
        ],
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(fields, indent=1) + "\n")
    print(f"recorded: {path.name} (now: python benchmarks/page.py)")
    return path


def about_this_run() -> dict[str, str | float]:
    """Where, when, beside how much other work and by which command, for a file of results."""
    return {
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
        "command": _command(sys.argv),
    }


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise ValueError(f"{value} is no result")
    return float(f"{value:.4g}")


def _command(argv: Sequence[str]) -> str:
    """As one types it in the project's folder."""
    words = [f"benchmarks/{Path(argv[0]).name}"]
    rest = iter(argv[1:])
    for word in rest:
        if word in OWN:
            next(rest, None)
        elif word != "--record" and not word.startswith(tuple(f"{own}=" for own in OWN)):
            words.append(word)
    chosen = [f"{name}={os.environ[name]} " for name in VARIABLES if os.environ.get(name)]
    return f"{''.join(chosen)}python {shlex.join(words)}"

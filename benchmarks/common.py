"""What the benchmarks share: the machine's line, interleaved timing, peak memory of a command."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def machine() -> str:
    """One line: processor, cores this process may use, Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def interleaved(
    sides: Mapping[str, Callable[[], float | None]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side over `repeats` rounds A B A B ...; a side may return its own seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(warmup + repeats):
        for name, run in sides.items():
            began = time.perf_counter()
            own = run()
            spent = time.perf_counter() - began if own is None else own
            if round_ >= warmup:
                seconds[name].append(spent)
    return seconds


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over rounds of a/b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def peak_rss(command: Sequence[str]) -> int:
    """Peak resident bytes of the largest process of `command` (itself or one it waited for)."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit {status}: {said.decode()[-500:]}")
    return usage.ru_maxrss * 1024

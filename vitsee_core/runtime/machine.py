"""Resources available to this process: cores, memory, disk; and freed memory that is kept for work
that requests the same sizes again and again. Standard library only."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitsee_stores.url import Place


# In the environment of a process that vitsee starts: how many share the cores that it has itself.
SHARED = "VITSEE_SHARED_BY"
# Of the libraries' own threads, read as they are loaded.
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "POLARS_MAX_THREADS",
)
# What drivers of GPUs put there: NVIDIA's, that of Windows' Linux, AMD's.
DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# The parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
# glibc's own: what its thresholds, which follow the largest block that was freed, grow to.
MMAP_MAX = 65536
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 64 << 20
OF_THE_USER = {
    "GLIBC_TUNABLES",
    *(f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD")),
}


def n_cores() -> int:
    """Cores this process may run on (its affinity, not the machine's count); without an affinity,
    its share among the job's processes on this machine; of these, its share among processes of
    vitsee's own."""
    every = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    cores = cores if cores != every else max(1, cores // local_processes(os.environ))
    return max(1, cores // (_number(SHARED, os.environ) or 1))


def shared_by(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for each of so many processes, so that together they take no more cores
    than this one may. A smaller number of threads that the user chose stays."""
    threads = max(1, n_cores() // processes)
    chosen = {name: min(threads, _number(name, environ) or threads) for name in THREADS}
    shared = processes * (_number(SHARED, environ) or 1)
    return {name: str(number) for name, number in (chosen | {SHARED: shared}).items()}


def _number(name: str, environ: Mapping[str, str]) -> int:
    """A whole number in the environment, 0 for none."""
    if environ.get(name, "").isdigit():
        return int(environ[name])
    return 0


def may_have_gpu() -> bool:
    """Whether a GPU's driver is loaded; torch, which knows more, takes seconds to import."""
    return sys.platform == "darwin" or any(Path(place).exists() for place in DEVICES)


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or less if a cgroup or job limits it, divided
    among the job's processes on this machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):
            continue  # no such hierarchy, or "max"
    return total // local_processes(os.environ)


def local_processes(environ: Mapping[str, str]) -> int:
    """Number of processes of this job on this machine, according to torchrun, MPI or SLURM's srun;
    1 if none says."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    # Tasks per node: "8", or "8(x2),4" for two nodes of 8 tasks and one of 4.
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return 1
        counts += [int(match[1])] * min(int(match[2] or 1), 100_000)
    node = environ.get("SLURM_NODEID", "0")
    if node.isdigit() and int(node) < len(counts):
        return max(1, counts[int(node)])
    return 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a torch error means that a device or the host is out of memory; torch has several
    such errors, recognised here without importing it."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "CUDA error: out of memory" in text
    )


def is_limited_memory(error: BaseException) -> bool:
    """Whether a library could not be loaded, or a mapping made, as the process may take no more
    memory (`ulimit -v`): the loader's words for it, or the system's."""
    text = str(error)
    of_a_library = isinstance(error, ImportError) and (
        "failed to map segment" in text or "cannot allocate memory" in text.lower()
    )
    return of_a_library or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether an error, or one that led to it, means that the system refused a new thread or
    process: of Python, of polars (a panic), or of fork."""
    errors: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in errors:
        errors.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(map(_refuses_thread, errors))


def _refuses_thread(error: BaseException) -> bool:
    text = str(error)
    if isinstance(
        error, BlockingIOError
    ):  # fork's EAGAIN; a full pipe's has another text
        return "Resource temporarily unavailable" in text
    refused = "WouldBlock" in text or "Resource temporarily unavailable" in text
    return "can't start new thread" in text or ("thread" in text and refused)


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def disk_block_bytes(path: Path) -> int:
    """Allocation unit of the file system of `path`, which need not exist; 4 kB if the file system
    reports its transfer size instead, which may be a megabyte."""
    return min(os.statvfs(_existing(path)).f_frsize, 4096)


TAR_INDEX = ".tars.npz"  # how the index of tar files ends, in that folder


def user_caches() -> Path:
    """The user's folder of what vitsee keeps between commands, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitsee"


def _existing(path: Path) -> Path:
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def scratch_folder(place: Place) -> Path:
    """A folder on this machine for temporary data of a store: the store's own folder, or for a
    store at a URL the system's folder for temporary files."""
    if isinstance(place, Path):
        return place.absolute().parent
    return Path(tempfile.gettempdir())


def plural(n: int, noun: str) -> str:
    """`1 image`, `2 images`, `1 Gram matrix`; `noun` is the plural."""
    if n == 1:
        # matrix, query, class, analysis, image
        ends = {"ices": "ix", "ies": "y", "sses": "ss", "yses": "ysis", "s": ""}
        end = next((end for end in ends if noun.endswith(end)), "")
        noun = noun.removesuffix(end) + ends.get(end, "")
    return f"{n} {noun}"


def human_bytes(n: float) -> str:
    """`n` bytes in powers of 1000: 3.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:
            if unit == "B" or n >= 99.5:
                return f"{n:.0f} {unit}"
            return f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Context in which freed memory is kept for the next request; on exit it returns to the system.

    Every layer of a model frees and requests tensors of some ten megabytes. glibc returns such
    blocks at once, and the kernel zeroes pages before handing them out again: up to a fifth of a
    forward pass (`GLIBC_TUNABLES= python benchmarks/extraction.py` runs without it). Resident
    memory stays at its peak, plus a few per cent of fragmentation.

    Does nothing without glibc, or if the user set its parameters in the environment.
    """
    if OF_THE_USER & os.environ.keys() or (glibc := _glibc()) is None:
        yield
        return
    glibc.mallopt(M_MMAP_MAX, 0)
    glibc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        glibc.mallopt(M_MMAP_MAX, MMAP_MAX)
        glibc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        glibc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        glibc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """The C library of this process, None if it is another."""
    import ctypes

    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    glibc = hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")
    return library if glibc else None

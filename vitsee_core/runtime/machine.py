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
SHARED_BY = "VITSEE_SHARED_BY"
# Of the libraries' own threads, read as they are loaded.
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "POLARS_MAX_THREADS",
)
# Files of the drivers of GPUs: NVIDIA's, that of Linux on Windows, AMD's.
DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# The parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
# glibc's own values: its thresholds follow the largest block that was freed, up to these.
MMAP_MAX = 65536
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 64 << 20
# Variables by which a user sets them.
MALLOC_SETTINGS = {
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
}


def n_cores() -> int:
    """Return how many cores this process may use.

    These are the cores of its affinity, not all of the machine's. Without an affinity it is its
    share among the processes of the job on this machine. Either is divided among the processes
    that vitsee itself started beside it.
    """
    machine_cores = os.cpu_count() or 1
    cores = machine_cores
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if cores == machine_cores:
        cores = max(1, cores // local_processes(os.environ))
    return max(1, cores // (_number_in_environment(SHARED_BY, os.environ) or 1))


def shared_by(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for each of so many processes.

    With them they take no more cores together than this process may. A smaller number of threads
    that the user chose stays.
    """
    threads = max(1, n_cores() // processes)
    variables = {}
    for name in THREADS:
        n_threads = min(threads, _number_in_environment(name, environ) or threads)
        variables[name] = str(n_threads)
    # Processes may start processes themselves: their cores are divided again.
    n_sharing = processes * (_number_in_environment(SHARED_BY, environ) or 1)
    variables[SHARED_BY] = str(n_sharing)
    return variables


def _number_in_environment(name: str, environ: Mapping[str, str]) -> int:
    """Return a whole number in the environment; 0 if there is none."""
    if environ.get(name, "").isdigit():
        return int(environ[name])
    return 0


def may_have_gpu() -> bool:
    """Return whether a GPU's driver is loaded; torch, which knows more, takes seconds to import."""
    return sys.platform == "darwin" or any(Path(path).exists() for path in DEVICES)


def memory_bytes() -> int:
    """Return how much memory this process may use, in bytes.

    It is the machine's, or less if a cgroup or job limits it, divided among the processes of the
    job on this machine.
    """
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
    """Return the number of processes of this job on this machine.

    torchrun, MPI and SLURM's srun say it in the environment; 1 if none does.
    """
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
    """Return whether a torch error means that a device or the host is out of memory.

    torch has several such errors, recognised here without importing it.
    """
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "CUDA error: out of memory" in text
    )


def is_limited_memory(error: BaseException) -> bool:
    """Return whether the process was refused memory by a limit (`ulimit -v`).

    A library could then not be loaded, or memory not be mapped.
    """
    if isinstance(error, ImportError):
        # In the words of the loader.
        text = str(error)
        return "failed to map segment" in text or "cannot allocate memory" in text.lower()
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def is_out_of_threads(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, is the refusal of a thread or process.

    Python, polars (a panic) and fork each have words of their own for it.
    """
    errors: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in errors:
        errors.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(map(_refuses_thread, errors))


def _refuses_thread(error: BaseException) -> bool:
    """Return whether an error itself says that a thread or process was refused."""
    text = str(error)
    if isinstance(error, BlockingIOError):
        # EAGAIN of fork; that of a full pipe has another text.
        return "Resource temporarily unavailable" in text
    refused = "WouldBlock" in text or "Resource temporarily unavailable" in text
    return "can't start new thread" in text or ("thread" in text and refused)


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes on the file system of `path`, which need not exist."""
    return shutil.disk_usage(_existing_parent(path)).free


def disk_block_bytes(path: Path) -> int:
    """Return the allocation unit, in bytes, of the file system of `path`, which need not exist.

    At most 4 kB: some file systems report their transfer size instead, which may be a megabyte.
    """
    return min(os.statvfs(_existing_parent(path)).f_frsize, 4096)


TAR_INDEX = ".tars.npz"  # how the index of tar files ends, in that folder


def user_caches() -> Path:
    """Return the user's folder for what vitsee keeps between commands; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitsee"


def _existing_parent(path: Path) -> Path:
    """Return the path, or its closest parent that exists."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def scratch_folder(place: Place) -> Path:
    """Return a folder on this machine for temporary data of a store.

    It is the folder that the store is in, or for a store at a URL the system's folder for
    temporary files.
    """
    if isinstance(place, Path):
        return place.absolute().parent
    return Path(tempfile.gettempdir())


def plural(n: int, noun: str) -> str:
    """Return a count with its noun: `1 image`, `2 images`, `1 Gram matrix`.

    noun: the plural.
    """
    if n != 1:
        return f"{n} {noun}"
    # matrix, query, class, analysis, image: the longest ending first
    singular_endings = {"ices": "ix", "ies": "y", "sses": "ss", "yses": "ysis", "s": ""}
    for plural_ending, singular_ending in singular_endings.items():
        if noun.endswith(plural_ending):
            noun = noun.removesuffix(plural_ending) + singular_ending
            break
    return f"{n} {noun}"


def human_bytes(n: float) -> str:
    """Return a number of bytes in powers of 1000: 3.6 MB."""
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
    glibc = None
    if not MALLOC_SETTINGS & os.environ.keys():
        glibc = _glibc()
    if glibc is None:
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
    """Return the C library of this process; None if it is not glibc."""
    import ctypes

    if os.name != "posix":
        return None
    library: Any = ctypes.CDLL(None)
    is_glibc = hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")
    return library if is_glibc else None

"""A `map` over the workers of a Dask cluster, for `Execution.map`: `--dask` of every command.

    with dask_map("local:4") as map:
        table = cka.run("a.zarr", "b.zarr", map=map)

Sent are a function, once per worker if it is large, and one small item per task; results are small,
too: workers read stores and write Gram matrices and slabs themselves. Results arrive in the items'
order, with a bounded number waiting, so that sums are added in the same order as in one process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from vitsee_core.runtime.dask_worker import REMEDY, DaskError, Done, done, refusal
from vitsee_core.runtime.lanes import submitted
from vitsee_core.runtime.machine import THREADS, human_bytes, n_cores, plural
from vitsee_core.runtime.versions import worker_versions
from vitsee_stores.errors import VitseeError

R = TypeVar("R")

WAIT_SECONDS = (
    10.0  # for a scheduler's response, and before logging the wait for a worker
)
WORKER_SECONDS = 600.0  # for the first worker, which may still be queued
RETRIES = 2  # after an unexpected error
LARGE = 1 << 14  # bytes; larger functions are sent once per worker, not with every task
LOST = "the Dask cluster was lost"
AHEAD = 4  # tasks per worker thread: running, waiting or not yet collected

log = logging.getLogger(__name__)


class DaskMap:
    """Like the builtin `map`, on the workers of a cluster.

    Attributes:
        client: of the cluster.
        address: as the user wrote it.
        local: number of processes started on this machine for this work; 0 if the cluster is
            elsewhere.
        modules: of guests whose code workers have to have.
        sent: bytes of functions and items so far.
        received: bytes of results so far.
    """

    def __init__(self, client: Any, address: str, local: int = 0) -> None:
        self.client = client
        self.address = address
        self.local = local
        self.modules: set[str] = set()
        self.sent = self.received = 0
        self._threads: dict[str, int] = {}  # of each worker
        self._asked = -math.inf

    def __call__(
        self, function: Callable[[Any], R], items: Iterable[Any], /
    ) -> Iterator[R]:
        """Apply `function` to each item, results in order. Raises VitseeError: a task raised it;
        the cluster is gone; or a worker has other versions."""
        import cloudpickle

        work = cloudpickle.dumps(function)
        with self._on_workers(work) as given:
            modules = tuple(sorted(self.modules))
            task = partial(done, worker_versions(modules), given, modules=modules)

            def submit(data: bytes) -> Any:
                self.sent += len(data) + (len(given) if given is work else 0)
                return self.client.submit(task, data, pure=False, retries=RETRIES)

            pickled = (pickle.dumps(item, protocol=5) for item in items)
            yield from submitted(
                submit, pickled, lambda: AHEAD * self.n_threads(), self._result
            )

    @contextmanager
    def _on_workers(self, work: bytes) -> Iterator[bytes | str]:
        """A pickled function as tasks refer to it. A large one is sent once to each worker, also to
        those that join later, as a plugin: a dependency would draw all tasks to the workers that
        hold it, and be lost with them."""
        if len(work) <= LARGE:
            yield work
            return
        from distributed import WorkerPlugin

        class Work(WorkerPlugin):
            def __init__(self) -> None:
                self.work = work

        plugin = Work()
        name = f"vitsee-{secrets.token_hex(8)}"
        self.sent += len(work) * max(1, self.n_workers())
        with _one_line(LOST):
            self.client.register_plugin(plugin, name)
        try:
            yield name
        finally:
            with contextlib.suppress(Exception):  # the first error is the one to be shown
                self.client.unregister_worker_plugin(name)

    def n_threads(self) -> int:
        """Tasks that the cluster can run at a time, as of the last second; at least 1."""
        return max(1, sum(self._now().values()))

    def n_workers(self) -> int:
        """Number of workers, refreshed at most once per second."""
        return len(self._now())

    def _now(self) -> dict[str, int]:
        if time.monotonic() - self._asked > 1.0:
            with _one_line(LOST):
                self._threads = self.client.nthreads()
            self._asked = time.monotonic()
        return self._threads

    def _result(self, future: Any) -> Any:
        """Wait for a task's result, or raise its error: a user's mistake, or other versions on a
        worker."""
        try:
            with _one_line(LOST, of_task=True):
                data = self._waited_for(future)
        except VitseeError:
            raise
        except Exception:
            self.check_versions()  # a worker without this code fails in arbitrary ways
            raise
        self.received += len(data)
        reply: Done = pickle.loads(data)
        for name, level, line in reply.lines:
            logging.getLogger(name).log(level, "%s", line)
        if reply.error is not None:
            raise reply.error
        return reply.result

    def _waited_for(self, future: Any) -> bytes:
        warned = False
        while True:
            try:
                return future.result(timeout=2.0)
            except TimeoutError:
                if future.done():  # the task's own
                    raise
                if not warned and not self.client.nthreads():
                    log.warning(
                        "the Dask cluster has no workers left: waiting for new ones"
                    )
                    warned = True

    def check_versions(self) -> None:
        """Raises DaskError: a worker has other versions, or no vitsee."""
        modules = tuple(sorted(self.modules))
        with _one_line(
            f"the Dask workers at {self.address} cannot be asked for their versions"
        ):
            answers: Mapping[str, Any] = self.client.run(
                partial(worker_versions, modules), on_error="return"
            )
        for worker, theirs in answers.items():
            if not isinstance(theirs, dict):
                raise DaskError(
                    f"the Dask worker at {worker} cannot run vitsee ({_said(theirs)}); {REMEDY}"
                )
            if error := refusal(worker, theirs, worker_versions(modules)):
                raise error


# ---------------------------------------------------------------- the cluster


def parse_address(text: str) -> str | int:
    """The address of a scheduler, or the number of processes in `local:N`. Raises DaskError:
    neither."""
    if text == "local":
        return n_cores()
    if match := re.fullmatch(r"local:([1-9]\d{0,3})", text):
        return int(match[1])
    if re.fullmatch(r"([a-z]+://)?[\w.\[\]:-]*[\w\]]:\d+", text) and not text.startswith(
        "local:"
    ):
        return text
    raise DaskError(
        f"{text!r}; expected local:N with N processes from 1 on, or a scheduler's address as "
        "tcp://HOST:8786"
    )


@contextmanager
def dask_map(address: str) -> Iterator[DaskMap]:
    """A map over the workers of the cluster at `address`, or over N processes of this machine that
    `local:N` starts and stops. Raises DaskError: a missing package, no response, no workers, or
    other versions of vitsee, Python or Dask."""
    where = parse_address(address)
    try:
        import distributed
    except ImportError:
        raise DaskError(
            "--dask needs the package distributed; run: pip install 'vitsee[dask]'"
        ) from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", category=distributed.versions.VersionMismatchWarning
        )
        stack.enter_context(_quiet())
        if isinstance(where, int):
            try:
                cluster = stack.enter_context(_local(where))
            except (
                RuntimeError
            ) as error:  # Dask wraps any error in this, even a full disk's
                raise DaskError(f"no Dask processes on this machine: {error}") from error
            client = stack.enter_context(
                distributed.Client(cluster, set_as_default=False)
            )
            made = DaskMap(client, address, where)
        else:
            with _one_line(f"no Dask scheduler answers at {where}"):
                client = distributed.Client(
                    where, timeout=WAIT_SECONDS, set_as_default=False
                )
            stack.enter_context(client)
            made = DaskMap(client, address)
        _wait_for_workers(made)
        made.check_versions()
        log.info(
            "Dask at %s: %s, %s in all",
            *(address, plural(made.n_workers(), "workers")),
            plural(made.n_threads(), "threads"),
        )
        yield made
        log.debug(
            "to the workers went %s, from them came %s",
            *(human_bytes(made.sent), human_bytes(made.received)),
        )


@contextmanager
def _local(processes: int) -> Iterator[Any]:
    """Single-threaded processes that share this process' cores."""
    import dask
    import distributed

    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, n_cores() // processes)))
    config = {
        "distributed.worker.daemon": False,  # a task may start processes of its own
        # The work bounds its memory itself; page cache must not get a worker killed.
        "distributed.worker.memory.terminate": False,
        "distributed.worker.memory.pause": False,
        # Otherwise every large array is fresh memory from the system: k-NN takes twice as long.
        "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,
    }
    with (
        dask.config.set(config),
        distributed.LocalCluster(
            n_workers=processes,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            security=True,  # other users of this machine must not run code here
            memory_limit=0,
            silence_logs=logging.CRITICAL,
            # In torchrun's form, read by `machine`, which divides the machine equally.
            env={
                **{name: os.environ.get(name, threads) for name in THREADS},
                "LOCAL_WORLD_SIZE": str(processes),
            },
        ) as cluster,
    ):
        yield cluster


def _wait_for_workers(made: DaskMap) -> None:
    begun = time.monotonic()
    warned = False
    address = made.address
    with _one_line(f"the Dask scheduler at {address} does not answer"):
        while not made.n_workers():
            waited = time.monotonic() - begun
            if waited > WORKER_SECONDS:
                raise DaskError(
                    f"the Dask scheduler at {address} had no workers for {waited:.0f} s; start "
                    "some (cluster.scale, dask worker) and repeat the command"
                )
            if waited > WAIT_SECONDS and not warned:
                log.warning(
                    "the Dask scheduler at %s has no workers yet (cluster.scale, dask worker): "
                    "waiting %.0f minutes at most",
                    *(address, WORKER_SECONDS / 60),
                )
                warned = True
            time.sleep(0.2)


@contextmanager
def _one_line(what: str, *, of_task: bool = False) -> Iterator[None]:
    """Reraise Dask's own errors as one line, `what` and Dask's message; those of a task pass
    unchanged."""
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError
    from distributed.comm.core import CommClosedError

    errors: tuple[type[Exception], ...] = FutureCancelledError, CommClosedError
    if not of_task:
        errors = *errors, TimeoutError, ValueError, OSError
    try:
        yield
    except KilledWorker as error:
        raise DaskError(
            f"one piece of the work ended {plural(error.allowed_failures + 1, 'workers')} (out of "
            "memory? their logs say more); give workers more memory, or take a smaller --memory"
        ) from None
    except errors as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DaskError(f"{what} ({_said(error)})") from None


def _said(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)

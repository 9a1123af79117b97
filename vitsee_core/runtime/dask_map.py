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

# For a scheduler's response, and before the wait for a worker is logged.
WAIT_SECONDS = 10.0
WORKER_SECONDS = 600.0  # for the first worker, which may still be queued
RETRIES = 2  # after an unexpected error
LARGE_FUNCTION_BYTES = (
    1 << 14
)  # bytes; larger functions are sent once per worker, not with every task
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
        """Apply `function` to each item, and yield the results in order.

        Raises:
            VitseeError: a task raised it; the cluster is gone; or a worker has other versions.
        """
        import cloudpickle

        # By value: pickle would send a function of a script by its name, which workers lack.
        pickled_function = cloudpickle.dumps(function)
        with self._function_on_workers(pickled_function) as function_or_name:
            modules = tuple(sorted(self.modules))
            versions = worker_versions(modules)
            task = partial(done, versions, function_or_name, modules=modules)

            def submit(data: bytes) -> Any:
                """Send a pickled item as a task, and return its future."""
                self.sent += len(data)
                if function_or_name is pickled_function:
                    self.sent += len(pickled_function)
                return self.client.submit(task, data, pure=False, retries=RETRIES)

            pickled = (pickle.dumps(item, protocol=5) for item in items)
            yield from submitted(
                submit, pickled, lambda: AHEAD * self.n_threads(), self._result
            )

    @contextmanager
    def _function_on_workers(self, work: bytes) -> Iterator[bytes | str]:
        """Context with the function itself, if it is small, or the name of the plugin that has it.

        A large function is sent once to each worker, also to those that join later, as a plugin:
        a dependency of Dask's would draw all tasks to the workers that hold it, and be lost with
        them.
        """
        if len(work) <= LARGE_FUNCTION_BYTES:
            yield work
            return
        from distributed import WorkerPlugin

        class Work(WorkerPlugin):
            """Carry the function to each worker once, also to those that come later."""

            def __init__(self) -> None:
                self.work = work

        plugin = Work()
        name = f"vitsee-{secrets.token_hex(8)}"
        self.sent += len(work) * max(1, self.n_workers())
        with _errors_as_one_line(LOST):
            self.client.register_plugin(plugin, name)
        try:
            yield name
        finally:
            with contextlib.suppress(Exception):  # the first error is the one to be shown
                self.client.unregister_worker_plugin(name)

    def n_threads(self) -> int:
        """Return how many tasks the cluster can run at a time, as of the last second; 1 or more."""
        return max(1, sum(self._threads_of_workers().values()))

    def n_workers(self) -> int:
        """Return the number of workers, as of the last second."""
        return len(self._threads_of_workers())

    def _threads_of_workers(self) -> dict[str, int]:
        """Return worker -> number of threads; the scheduler is asked once per second at most."""
        if time.monotonic() - self._asked > 1.0:
            with _errors_as_one_line(LOST):
                self._threads = self.client.nthreads()
            self._asked = time.monotonic()
        return self._threads

    def _result(self, future: Any) -> Any:
        """Wait for a task's result and return it; its log lines are logged here.

        Raises:
            VitseeError: the task raised it, or the worker has other versions.
        """
        try:
            with _errors_as_one_line(LOST, of_task=True):
                data = self._wait_for(future)
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

    def _wait_for(self, future: Any) -> bytes:
        """Wait for a future; warn once while there is no worker that could do the task."""
        warned = False
        while True:
            try:
                return future.result(timeout=2.0)
            except TimeoutError:
                # Either the task's own error, or the task ended just after the wait did, or its
                # result is longer on the way: the task is asked again, and says which.
                if future.done():
                    return future.result()
                if not warned and not self.client.nthreads():
                    log.warning(
                        "the Dask cluster has no workers left: waiting for new ones"
                    )
                    warned = True

    def check_versions(self) -> None:
        """Refuse workers that would compute other numbers.

        Raises:
            DaskError: a worker has other versions, or no vitsee.
        """
        modules = tuple(sorted(self.modules))
        with _errors_as_one_line(
            f"the Dask workers at {self.address} cannot be asked for their versions"
        ):
            answers: Mapping[str, Any] = self.client.run(
                partial(worker_versions, modules), on_error="return"
            )
        for worker, theirs in answers.items():
            if not isinstance(theirs, dict):
                raise DaskError(
                    f"the Dask worker at {worker} cannot run vitsee "
                    f"({_error_text(theirs)}); {REMEDY}"
                )
            error = refusal(worker, theirs, worker_versions(modules))
            if error is not None:
                raise error


# ---------------------------------------------------------------- the cluster


def parse_address(text: str) -> str | int:
    """Return the address of a scheduler, or the number of processes in `local:N`.

    Raises:
        DaskError: the text is neither.
    """
    if text == "local":
        return n_cores()
    match = re.fullmatch(r"local:([1-9]\d{0,3})", text)
    if match is not None:
        return int(match[1])
    is_address = re.fullmatch(r"([a-z]+://)?[\w.\[\]:-]*[\w\]]:\d+", text) is not None
    if is_address and not text.startswith("local:"):
        return text
    raise DaskError(
        f"{text!r}; expected local:N with N processes from 1 on, or a scheduler's "
        "address as tcp://HOST:8786"
    )


@contextmanager
def dask_map(address: str) -> Iterator[DaskMap]:
    """Context with a map over the workers of a cluster.

    address: a scheduler's address, or `local:N` for N processes of this machine, which are started
    and stopped.

    Raises:
        DaskError: a missing package, no response, no workers, or other versions of vitsee, Python
            or Dask.
    """
    scheduler = parse_address(address)
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
        stack.enter_context(_silent_logger())
        if isinstance(scheduler, int):
            try:
                cluster = stack.enter_context(_local_cluster(scheduler))
            except RuntimeError as error:
                # Dask wraps any error in this, even that of a full disk.
                raise DaskError(f"no Dask processes on this machine: {error}") from error
            client = stack.enter_context(
                distributed.Client(cluster, set_as_default=False)
            )
            over_workers = DaskMap(client, address, local=scheduler)
        else:
            with _errors_as_one_line(f"no Dask scheduler answers at {scheduler}"):
                client = distributed.Client(
                    scheduler, timeout=WAIT_SECONDS, set_as_default=False
                )
            stack.enter_context(client)
            over_workers = DaskMap(client, address)
        _wait_for_workers(over_workers)
        over_workers.check_versions()
        log.info(
            "Dask at %s: %s, %s in all",
            address,
            plural(over_workers.n_workers(), "workers"),
            plural(over_workers.n_threads(), "threads"),
        )
        yield over_workers
        log.debug(
            "to the workers went %s, from them came %s",
            human_bytes(over_workers.sent),
            human_bytes(over_workers.received),
        )


@contextmanager
def _local_cluster(processes: int) -> Iterator[Any]:
    """Context with a cluster of single-threaded processes that share this process' cores."""
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


def _wait_for_workers(over_workers: DaskMap) -> None:
    """Wait for the first worker. Raises DaskError: none comes in `WORKER_SECONDS`."""
    begun = time.monotonic()
    warned = False
    address = over_workers.address
    with _errors_as_one_line(f"the Dask scheduler at {address} does not answer"):
        while not over_workers.n_workers():
            waited = time.monotonic() - begun
            if waited > WORKER_SECONDS:
                raise DaskError(
                    f"the Dask scheduler at {address} had no workers for {waited:.0f} "
                    "s; start some (cluster.scale, dask worker) and repeat the command"
                )
            if waited > WAIT_SECONDS and not warned:
                log.warning(
                    "the Dask scheduler at %s has no workers yet (cluster.scale, dask "
                    "worker): waiting %.0f minutes at most",
                    address,
                    WORKER_SECONDS / 60,
                )
                warned = True
            time.sleep(0.2)


@contextmanager
def _errors_as_one_line(summary: str, *, of_task: bool = False) -> Iterator[None]:
    """Context that raises Dask's own errors as a DaskError: a summary, then Dask's message.

    of_task: errors that a task may raise itself pass unchanged.
    """
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
            "one piece of the work ended "
            f"{plural(error.allowed_failures + 1, 'workers')} (out of memory? their "
            "logs say more); give workers more memory, or take a smaller --memory"
        ) from None
    except errors as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DaskError(f"{summary} ({_error_text(error)})") from None


def _error_text(error: object) -> str:
    """Return the type and message of an error in a line of 200 characters at most."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:200]


@contextmanager
def _silent_logger() -> Iterator[None]:
    """Context in which Dask's own log lines are not shown."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)

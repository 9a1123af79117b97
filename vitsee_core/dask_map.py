"""A `map` over the workers of a Dask cluster, for `Execution.map`: `--dask` of every command.

    with dask_map("local:4") as map:
        table = cka.run("a.zarr", "b.zarr", map=map)

What is sent is a function, once per worker as far as it is large, and one small item per task; what
comes back is small too: workers read stores and write Gram matrices and slabs themselves. Results
come in the items' order, a bounded number of them before they are taken, so that what is added up
is added in the same order as by one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import pickle
import re
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from vitsee_core.dask_worker import DaskError, Done, done, forget, hold
from vitsee_core.machine import counted, human_bytes, n_cores
from vitsee_core.versions import SAME, worker_versions

R = TypeVar("R")

WAIT_SECONDS = 10.0  # for a scheduler's answer, and in silence for a first worker
WORKER_SECONDS = 600.0  # for that worker, which a cluster's queue may still have to start
RETRIES = 2  # of a task whose error is nobody's mistake
LARGE = 1 << 14  # bytes of a function that goes to each worker once, not with every task
AHEAD = 4  # tasks for each thread of the workers, running, waiting or not yet taken

log = logging.getLogger(__name__)


class DaskMap:
    """As the builtin `map`, done by the workers of a cluster.

    client: of the cluster. local: how many of its processes are this machine's own, started for
    this work; 0 where they are elsewhere. sent, received: bytes of functions with their items, and
    of results, so far.
    """

    def __init__(self, client: Any, local: int = 0) -> None:
        self.client, self.local = client, local
        self.sent = self.received = 0
        self._threads: dict[str, int] = {}  # of each worker
        self._asked = -math.inf

    def __call__(self, function: Callable[[Any], R], items: Iterable[Any], /) -> Iterator[R]:
        """`function` of each item, in their order.

        Raises:
            VitseeError: a task raised it; or the cluster is gone.
        """
        import cloudpickle

        work = cloudpickle.dumps(function)
        name = f"vitsee-{hashlib.sha256(work).hexdigest()[:8]}-{secrets.token_hex(3)}"
        large = len(work) > LARGE
        waiting: deque[tuple[Any, bytes]] = deque()

        def submit(data: bytes) -> Any:
            self.sent += len(data) + (0 if large else len(work))
            key = f"{name}-{secrets.token_hex(4)}"
            given = name if large else work
            return self.client.submit(done, given, data, key=key, retries=RETRIES)

        def result() -> Any:
            future, data = waiting.popleft()
            while (found := self._result(future)) is None:  # a worker that came since
                self._hand_out(name, work)
                future = submit(data)
            return found.result

        if large:
            self._hand_out(name, work)
        try:
            for item in items:
                data = pickle.dumps(item, protocol=5)
                waiting.append((submit(data), data))
                while len(waiting) >= AHEAD * self.n_threads():
                    yield result()
            while waiting:
                yield result()
        finally:
            with contextlib.suppress(Exception):  # the first error is the one to be shown
                if waiting:
                    self.client.cancel([future for future, _ in waiting], force=True)
                if large:
                    self.client.run(forget, name, on_error="ignore")

    def _hand_out(self, name: str, work: bytes) -> None:
        """Give every worker `work`. Not as what tasks depend on: they would all go where it is."""
        self.sent += len(work) * max(1, self.n_workers())
        with _one_line("the Dask cluster was lost"):
            self.client.run(hold, name, work, on_error="ignore")

    def n_threads(self) -> int:
        """Tasks that the cluster can do at a time, as of the last second; at least 1."""
        return max(1, sum(self._now().values()))

    def n_workers(self) -> int:
        """Workers that the cluster has, as of the last second."""
        return len(self._now())

    def _now(self) -> dict[str, int]:
        if time.monotonic() - self._asked > 1.0:
            with _one_line("the Dask cluster was lost"):
                self._threads = self.client.nthreads()
            self._asked = time.monotonic()
        return self._threads

    def _result(self, future: Any) -> Done | None:
        """What a task came to, waited for; None where its worker was not given the work.

        Raises:
            VitseeError: it is a user's mistake.
        """
        warned = False
        with _one_line("the Dask cluster was lost"):
            while True:
                try:
                    data = future.result(timeout=2.0)
                    break
                except TimeoutError:
                    if future.status == "error":
                        raise
                    if not warned and not self.client.nthreads():
                        log.warning("the Dask cluster has no workers left: waiting for new ones")
                        warned = True
        self.received += len(data)
        found: Done | None = pickle.loads(data)
        if found is None:
            return None
        for name, level, line in found.lines:
            logging.getLogger(name).log(level, "%s", line)
        if found.error is not None:
            raise found.error
        return found


# ---------------------------------------------------------------- the cluster


def parse_address(text: str) -> str | int:
    """The address of a scheduler, or the number of processes of `local:N`.

    Raises:
        DaskError: neither.
    """
    if text == "local":
        return n_cores()
    if match := re.fullmatch(r"local:([1-9]\d{0,3})", text):
        return int(match[1])
    if re.fullmatch(r"([a-z]+://)?[\w.\[\]:-]*[\w\]]:\d+", text) and not text.startswith("local:"):
        return text
    raise DaskError(
        f"{text!r}; expected local:N with N processes from 1 on, or a scheduler's address as "
        "tcp://HOST:8786"
    )


@contextmanager
def dask_map(address: str) -> Iterator[DaskMap]:
    """A map over the workers of the cluster at `address`, or over N processes of this machine that
    `local:N` starts and stops.

    Raises:
        DaskError: the package is missing, nobody answers there, or there are no workers, or other
            versions of vitsee, Python or Dask.
    """
    where = parse_address(address)
    try:
        import distributed
    except ImportError:
        raise DaskError(
            "--dask needs the package distributed; run: pip install 'vitsee[dask]'"
        ) from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=distributed.versions.VersionMismatchWarning)
        stack.enter_context(_quiet())
        if isinstance(where, int):
            cluster = stack.enter_context(_local(where))
            client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
            made = DaskMap(client, where)
        else:
            with _one_line(f"no Dask scheduler answers at {where}"):
                client = distributed.Client(where, timeout=WAIT_SECONDS, set_as_default=False)
            stack.enter_context(client)
            made = DaskMap(client)
        _wait_for_workers(made, address)
        _check_versions(client, address)
        log.info(
            "Dask at %s: %s, %s in all",
            *(address, counted(made.n_workers(), "workers")),
            counted(made.n_threads(), "threads"),
        )
        yield made
        log.debug(
            "to the workers went %s, from them came %s",
            *(human_bytes(made.sent), human_bytes(made.received)),
        )


@contextmanager
def _local(processes: int) -> Iterator[Any]:
    """Processes of one thread each, which share this one's cores."""
    import dask
    import distributed

    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, n_cores() // processes)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    config = {
        "distributed.worker.daemon": False,  # a task may start processes of its own
        # Memory is bounded by what the work takes; nobody is to be killed for a page cache.
        "distributed.worker.memory.terminate": False,
        "distributed.worker.memory.pause": False,
        # Set, it makes every large array fresh memory from the system: twice the time of k-NN.
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
            security=True,  # whoever else is on this machine shall not run code here
            memory_limit=0,
            silence_logs=logging.CRITICAL,
            # As torchrun says it, to `machine`: the machine is theirs in equal parts.
            env={
                **{name: os.environ.get(name, threads) for name in names},
                "LOCAL_WORLD_SIZE": str(processes),
            },
        ) as cluster,
    ):
        yield cluster


def _wait_for_workers(made: DaskMap, address: str) -> None:
    begun, warned = time.monotonic(), False
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


def _check_versions(client: Any, address: str) -> None:
    ours = worker_versions()
    with _one_line(f"the Dask workers at {address} cannot be asked for their versions"):
        answers: Mapping[str, Any] = client.run(worker_versions, on_error="return")
    remedy = "start workers from the same environment"
    for worker, theirs in answers.items():
        if not isinstance(theirs, dict):
            raise DaskError(
                f"the Dask worker at {worker} cannot run vitsee ({_said(theirs)}); {remedy}"
            )
        other = [name for name in ours if theirs.get(name) != ours[name]]
        if not other:
            continue
        there, here = (
            ", ".join(f"{name} {of.get(name, 'missing')}" for name in other)
            for of in (theirs, ours)
        )
        line = f"the Dask worker at {worker} has {there}; here: {here}"
        if {*other} & {*SAME}:
            raise DaskError(f"{line} ({remedy})")
        log.warning("%s: results may differ in their last digits", line)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Dask's own errors as one line.

    Raises:
        DaskError: `what`, and Dask's word for it.
    """
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError
    from distributed.comm.core import CommClosedError

    try:
        yield
    except KilledWorker as error:
        raise DaskError(
            f"one piece of the work ended {counted(error.allowed_failures + 1, 'workers')} (out of "
            "memory? their logs say more); give workers more memory, or take a smaller --memory"
        ) from None
    except (FutureCancelledError, CommClosedError, TimeoutError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DaskError(f"{what} ({_said(error)})") from None


def _said(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own log lines are for those who look for them."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)

"""A Dask cluster for tests: two worker processes, which any process of this machine can reach."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

import pytest

from vitsee_core.runtime.dask_map import DaskMap, dask_map


@contextmanager
def two_workers() -> Iterator[DaskMap]:
    """The map over them, and under `client.scheduler.address` what --dask takes."""
    import dask
    from distributed import LocalCluster
    from distributed.utils import get_mp_context

    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        # Workers of `--dask local:N`, in commands that tests start, import for themselves.
        get_mp_context().set_forkserver_preload(["tests.preloaded"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            patch.setenv("OMP_NUM_THREADS", "1")
            forkserver.ensure_running()
        with (
            LocalCluster(  # type: ignore[no-untyped-call]
                n_workers=2,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                memory_limit=0,
                silence_logs=50,
                env={**os.environ, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            ) as cluster,
            dask_map(cluster.scheduler_address) as made,
        ):
            made.local = 2
            yield made

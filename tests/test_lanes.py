"""Limits of BLAS threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES_ARE_FOUND = """
from threadpoolctl import threadpool_info
from vitsee_core.runtime.lanes import one_blas_thread

def threads():
    return [found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"]

import numpy
before = threads()
with one_blas_thread(), one_blas_thread():
    assert threads() == [1]
assert threads() == before
import scipy.linalg  # as wheels it brings a library of its own
before = threads()
assert min(before) > 1
with one_blas_thread():
    assert threads() == [1] * len(before)
assert threads() == before
"""


@pytest.mark.slow
def test_a_library_that_is_loaded_later_is_limited_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES_ARE_FOUND],
        env={"OPENBLAS_NUM_THREADS": "3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

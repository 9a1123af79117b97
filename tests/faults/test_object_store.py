"""Whole commands on an object store that answers 500, late, half or not at all, at random."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from tests.extractions import array_bytes, extracted
from tests.faults.conftest import Trial
from tests.faults.trials import (
    TRIALS,
    ends_well,
    extraction,
    moment,
    says_one_line,
    seeds,
)
from tests.processes import Ended
from tests.s3 import Fault, Proxy, download, environment, make_bucket, proxy, upload
from tests.s3 import server as s3_server
from vitsee_stores import open_store, validate

QUICKLY = "tests.faults.hooks:retry_soon"
SMALL = ["--sites", "last,head", "--attention", "none", "--no-residual"]

SHARES = (0.02, 0.08, 0.2) if TRIALS > 1 else (0.04,)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """What stands before a server, and fails as its `faults` say."""
    with s3_server() as port, proxy(port) as made, pytest.MonkeyPatch.context() as patch:
        make_bucket(port, "trials")
        made.patience = 0.8
        for name, value in environment(made.server_port).items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def local(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that a good disk gets."""
    path = tmp_path_factory.mktemp("local") / "s.zarr"
    extracted(*extraction(images, path)[1:], *SMALL)
    return path


def surroundings(bad: Proxy) -> dict[str, str]:
    return environment(bad.server_port) | {"AWS_TIMEOUT": "0.4s"}


def failing(rng: random.Random, share: float) -> list[Fault]:
    """Each kind of fault, each for a share of all requests."""
    return [
        Fault(what, lambda method, path: rng.random() < share)
        for what in ("500", "cut", "lost", "slow")
    ]


def how(done: Ended, url: str) -> str:
    """How a process ended: killed, well, or with one line that names the store."""
    if done.code == -signal.SIGKILL:
        return "killed, resumed"
    if done.code == 0:
        return "right bytes"
    assert url in says_one_line(done)
    return "one line, resumed"


def disturbed(
    trial: Trial, bad: Proxy, url: str, words: list[object], begun: str
) -> Iterator[None]:
    """After each process of a command: one that is killed, perhaps once a request names `begun`,
    and one for each share of requests that fail."""
    for share in (0.0, *SHARES):
        bad.faults = failing(trial.rng, share)
        process = trial.run.start(*words, env=surroundings(bad), before=QUICKLY)
        if not share:  # a good server, but killed
            moment(trial.rng, process, 6.0, lambda: any(begun in r for r in bad.requests))
            process.kill()
        trial.ended(how(process.end(), url))
        bad.faults = []
        yield


@pytest.mark.fault("extraction into a bucket whose server fails at random, killed too")
@seeds(1)
def test_an_extraction_through_a_bad_server(
    trial: Trial, bad: Proxy, local: Path, seed: int
) -> None:
    """Each process ends well or with one line; what the bucket holds at the end is right."""
    url, copy = f"s3://trials/{seed}/s.zarr", trial.folder / "copy.zarr"
    words = extraction(trial.images, url, *SMALL)
    for _ in disturbed(trial, bad, url, words, "c.0.0"):
        pass
    ends_well(trial.run.run(*words, env=surroundings(bad)))
    assert validate(url, deep=True) == []
    download(url, copy)
    assert array_bytes(copy) == array_bytes(local)


@pytest.mark.fault("cka on a bucket whose server fails at random")
@seeds(1)
def test_cka_through_a_bad_server(
    trial: Trial, bad: Proxy, local: Path, seed: int
) -> None:
    """The numbers of a good disk, or one line; never others."""
    run, url, env = trial.run, f"s3://trials/cka{seed}/s.zarr", surroundings(bad)
    bad.faults = []
    upload(local, url)
    cache = trial.folder / "cache"
    words = ["cka", url, "--sites", "*", "--cache", cache]
    expected = ends_well(run.run("cka", local, "--sites", "*", "--no-cache"))
    for share in SHARES:
        bad.faults = failing(trial.rng, share)
        done = run.run(*words, env=env, before=QUICKLY)
        if done.code:
            assert url in says_one_line(done)
        else:
            assert done.stdout == expected.stdout
        trial.ended("one line" if done.code else "same numbers")
    bad.faults = []
    assert open_store(url).complete
    assert ends_well(run.run(*words, env=env)).stdout == expected.stdout
    assert Counter(path.suffix for path in cache.iterdir()).keys() == {".tiles", ".json"}


@pytest.mark.fault("a store in a bucket whose server fails at random grows, killed too")
@pytest.mark.parametrize("kind", ["sites", "images"])
@seeds(1)
def test_a_store_grows_through_a_bad_server(
    trial: Trial, bad: Proxy, kind: str, seed: int
) -> None:
    """After each process the store has what it had, or all; at the end what a good disk gets."""
    url, env = f"s3://trials/grown-{kind}{seed}/s.zarr", surroundings(bad)
    more = {"sites": ["--images", 13, "--sites", "norms"], "images": ["--images", 24]}[
        kind
    ]
    bad.faults = []
    first = extraction(trial.images, url, *SMALL, "--images", 13)
    ends_well(trial.run.run(*first, env=env))
    before = open_store(url).vectors("logits")[
        :12
    ]  # the 13th is made again, in another batch
    words = extraction(trial.images, url, *more)
    for _ in disturbed(trial, bad, url, words, "generations/2"):
        assert_array_equal(open_store(url).vectors("logits")[:12], before)
    ends_well(trial.run.run(*words, env=env))
    assert validate(url, deep=True) == []
    extracted(*trial.extraction(*SMALL, *more)[1:])
    there, here = open_store(url), open_store(trial.path)
    assert there.generation == 2 and there.plan == here.plan
    for name in there.arrays:
        assert_array_equal(there.array(name)[...], here.array(name)[...], err_msg=name)

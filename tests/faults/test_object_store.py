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
from tests.faults.conftest import Ends
from tests.faults.trials import TRIALS, extraction, moment, says_one_line, seeds
from tests.processes import Ended, Server
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


@pytest.mark.fault("extraction into a bucket whose server fails at random, killed too")
@seeds(1)
def test_an_extraction_through_a_bad_server(
    run: Server,
    bad: Proxy,
    local: Path,
    images: Path,
    tmp_path: Path,
    seed: int,
    ended: Ends,
) -> None:
    """Each process ends well or with one line; what the bucket holds at the end is right."""
    rng, url = random.Random(seed), f"s3://trials/{seed}/s.zarr"
    words = extraction(images, url, *SMALL)
    env = surroundings(bad)
    for share in (0.0, *SHARES):
        bad.faults = failing(rng, share)
        process = run.start(*words, env=env, before=QUICKLY)
        if not share:  # a good server, but killed
            moment(rng, process, 6.0, lambda: any("c.0.0" in r for r in bad.requests))
            process.kill()
        done = process.end()
        ended(how(done, url))
    bad.faults = []
    done = run.run(*words, env=env)
    assert done.code == 0, done.stderr
    assert validate(url, deep=True) == []
    download(url, tmp_path / "copy.zarr")
    assert array_bytes(tmp_path / "copy.zarr") == array_bytes(local)


@pytest.mark.fault("cka on a bucket whose server fails at random")
@seeds(1)
def test_cka_through_a_bad_server(
    run: Server, bad: Proxy, local: Path, tmp_path: Path, seed: int, ended: Ends
) -> None:
    """The numbers of a good disk, or one line; never others."""
    rng, url = random.Random(seed), f"s3://trials/cka{seed}/s.zarr"
    bad.faults = []
    upload(local, url)
    env = surroundings(bad)
    cache = tmp_path / "cache"
    expected = run.run("cka", local, "--sites", "*", "--no-cache")
    assert expected.code == 0, expected.stderr
    for share in SHARES:
        bad.faults = failing(rng, share)
        done = run.run("cka", url, "--sites", "*", "--cache", cache, env=env, before=QUICKLY)
        if done.code:
            assert url in says_one_line(done)
            ended("one line")
        else:
            assert done.stdout == expected.stdout
            ended("same numbers")
    bad.faults = []
    assert open_store(url).complete
    done = run.run("cka", url, "--sites", "*", "--cache", cache, env=env)
    assert (done.code, done.stdout) == (0, expected.stdout), done.stderr
    assert Counter(path.suffix for path in cache.iterdir()).keys() == {".tiles", ".json"}


@pytest.mark.fault("a store in a bucket whose server fails at random grows, killed too")
@pytest.mark.parametrize("kind", ["sites", "images"])
@seeds(1)
def test_a_store_grows_through_a_bad_server(
    run: Server, bad: Proxy, images: Path, tmp_path: Path, kind: str, seed: int, ended: Ends
) -> None:
    """After each process the store has what it had, or all; at the end what a good disk gets."""
    rng, url = random.Random(seed), f"s3://trials/grown-{kind}{seed}/s.zarr"
    more = {"sites": ["--images", 13, "--sites", "norms"], "images": ["--images", 24]}[kind]
    bad.faults = []
    first, env = extraction(images, url, *SMALL, "--images", 13), surroundings(bad)
    assert run.run(*first, env=env).code == 0
    before = open_store(url).vectors("logits")[:12]  # the 13th is made again, in another batch
    words = extraction(images, url, *more)
    for share in (0.0, *SHARES):
        bad.faults = failing(rng, share)
        process = run.start(*words, env=env, before=QUICKLY)
        if not share:  # a good server, but killed
            moment(rng, process, 6.0, lambda: any("generations/2" in r for r in bad.requests))
            process.kill()
        done = process.end()
        ended(how(done, url))
        bad.faults = []
        assert_array_equal(open_store(url).vectors("logits")[:12], before)
    done = run.run(*words, env=env)
    assert done.code == 0, done.stderr
    assert validate(url, deep=True) == []
    whole = ["--sites", "norms"] if kind == "sites" else []
    extracted(*extraction(images, tmp_path / "s.zarr", *SMALL, *more[:2], *whole)[1:])
    there, here = open_store(url), open_store(tmp_path / "s.zarr")
    assert there.generation == 2 and there.plan == here.plan
    for name in there.arrays:
        assert_array_equal(there.array(name)[...], here.array(name)[...], err_msg=name)

"""An S3 server that fails, hangs, cuts its answers or loses them: the right numbers, or one clear
line; three tries, from one place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from click.testing import CliRunner
from numpy.testing import assert_array_equal
from obstore.exceptions import GenericError
from obstore.store import from_url

from tests.conftest import slab_arrays
from tests.s3 import (
    Fault,
    Proxy,
    environment,
    make_bucket,
    objects,
    proxy,
    server,
    upload,
)
from tests.test_remote_stores import PLAN, folder_name, manifest, samples, write
from vitsee_cli.main import main
from vitsee_stores import (
    IdentityMismatch,
    StoreError,
    StoreWriter,
    describe,
    open_store,
    validate,
)
from vitsee_stores import (
    objects as remote,
)

pytestmark = pytest.mark.fault("one request of an object store fails")

MakeStore = Callable[..., Path]
CHUNK = "/acts/embed/grid/c.1.0.0.0"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as number:
        make_bucket(number, "tests")
        yield number


@pytest.fixture
def faulty(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What stands between stores and the server."""
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    with proxy(port) as made:
        for name, value in environment(made.server_port).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def url(faulty: Proxy, make_store: MakeStore, request: pytest.FixtureRequest) -> str:
    """A whole store."""
    place = f"s3://tests/{folder_name(request)}/a.zarr"
    upload(make_store("a.zarr"), place)
    faulty.requests.clear()
    return place


def of_chunk(method: str, path: str) -> bool:
    return path.endswith(CHUNK)


@pytest.mark.parametrize("what", ["500", "cut", "lost", "slow"])
def test_a_read_that_fails_twice_gives_the_right_numbers(
    what: str,
    faulty: Proxy,
    url: str,
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if what == "slow":
        monkeypatch.setenv("AWS_TIMEOUT", "0.3s")
        faulty.patience = 0.6
    faulty.faults = [Fault(what, of_chunk, times=2)]
    expected = open_store(make_store("b.zarr")).acts("embed")[:]
    assert_array_equal(open_store(url).acts("embed")[:], expected)
    assert sum(request.endswith(CHUNK) for request in faulty.requests) == 3


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("500", r"the server answered 500 Internal Server Error \(InternalError\)"),
        ("cut", r"the server's answer was cut short"),
        ("lost", r"the server gave no answer"),
        ("slow", r"the server did not answer in time"),
    ],
)
def test_a_read_that_fails_always_is_one_line(
    what: str, said: str, faulty: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "slow":
        monkeypatch.setenv("AWS_TIMEOUT", "0.3s")
        faulty.patience = 0.6
    faulty.faults = [Fault(what, of_chunk)]
    store = open_store(url)
    with pytest.raises(StoreError) as raised:
        store.acts("embed")[:]
    line = str(raised.value)
    start, end = f"{url} cannot be read: {CHUNK[1:]}: ", " (3 tries)"
    assert line.startswith(start) and line.endswith(end)
    assert re.fullmatch(said, line.removeprefix(start).removesuffix(end))
    assert max(Counter(faulty.requests).values()) == 3


def test_a_marker_that_cannot_be_asked_for_is_not_taken_for_a_missing_slab(
    faulty: Proxy, url: str
) -> None:
    faulty.faults = [Fault("500", lambda method, path: path.endswith("commits/c.1.0"))]
    obstore.delete(from_url(url), "commits/c.2.0")
    for call in (
        lambda: open_store(url, allow_partial=True),
        lambda: describe(url),
        lambda: open_store(url).revision,
    ):
        with pytest.raises(
            StoreError, match=rf"^{url} cannot be read: commits/c.1.0: the server"
        ):
            call()


@pytest.mark.parametrize(
    "name",
    [
        "valid/c.1",
        "samples/label/c.0",
        "n_valid/c.2",
        "checksums/c.0.0",
        "hash/zarr.json",
    ],
)
def test_what_gives_no_answer_is_not_taken_for_damage(
    name: str, faulty: Proxy, url: str
) -> None:
    """validate and info stop with the line, in place of reporting damage or leaving facts out."""
    faulty.faults = [Fault("500", lambda method, path: path.endswith(name))]
    said = rf"^{url} cannot be read: {name}: the server answered"
    with pytest.raises(StoreError, match=said):
        validate(url, deep=True)
    if name in ("samples/label/c.0", "n_valid/c.2", "checksums/c.0.0"):
        with pytest.raises(StoreError, match=said):
            describe(url)


def test_slow_answers_within_patience_are_only_slow(
    faulty: Proxy, url: str, make_store: MakeStore
) -> None:
    faulty.faults, faulty.patience = [Fault("slow")], 0.02
    assert_array_equal(
        open_store(url).acts("embed")[:],
        open_store(make_store("b.zarr")).acts("embed")[:],
    )


def test_after_an_error_nothing_more_is_asked_for(faulty: Proxy, url: str) -> None:
    """With a server that is gone, a store of thousands of chunks is one line, not an hour."""
    store = open_store(url)
    faulty.faults = [Fault("500")]
    items = list(range(200))
    asked: list[int] = []

    def fails(item: int) -> None:
        asked.append(item)
        store.files.read("zarr.json", 1 << 20)

    with pytest.raises(OSError, match=r"500 .* \(3 tries\)"):
        store.files.each_in_threads(fails, items)
    assert len(asked) < 100


def test_a_marker_whose_answer_is_lost_counts_as_put(faulty: Proxy, url: str) -> None:
    place = f"{url}.new"
    writer = write(place, manifest(), range(0))
    faulty.faults = [
        Fault(
            "lost",
            lambda method, path: method == "PUT" and path.endswith("c.0.0"),
            times=1,
        )
    ]
    assert writer.write_slab(0, slab_arrays(PLAN, 0), {}) > 0
    markers = [
        r for r in faulty.requests if r.startswith("PUT") and r.endswith("commits/c.0.0")
    ]
    assert len(markers) == 2
    assert describe(place)["n_committed"] == 1


def test_a_slab_that_cannot_be_put_is_not_committed(faulty: Proxy, url: str) -> None:
    place = f"{url}.new"
    writer = write(place, manifest(), range(1))
    faulty.faults = [
        Fault("500", lambda method, path: method == "PUT" and path.endswith("c.1.0"))
    ]
    with pytest.raises(StoreError) as raised:
        writer.write_slab(1, slab_arrays(PLAN, 1), {})
    assert str(raised.value) == (
        f"cannot write slab 1 of {place}: the server answered 500 Internal Server Error "
        "(InternalError) (3 tries); repeat the command, committed slabs are kept"
    )
    assert writer.committed().tolist() == [True, False, False]
    faulty.faults = []
    write(place, manifest())
    assert validate(place, deep=True) == []


def test_a_store_left_half_made_is_finished_by_who_comes_next(
    faulty: Proxy, url: str
) -> None:
    place = f"{url}.new"
    faulty.faults = [
        Fault("500", lambda method, path: method == "PUT" and "samples/" in path)
    ]
    with pytest.raises(
        StoreError, match=rf"cannot make {place}: the server answered 500"
    ):
        write(place, manifest())
    assert "zarr.json" in objects(place) and "commits/zarr.json" not in objects(place)
    faulty.faults = []
    joined = StoreWriter.join(place)
    assert joined is not None and not joined.is_created
    others = samples()
    others.ids[0] = "x.png"
    with pytest.raises(
        StoreError, match="was left half made, from other images or weights"
    ):
        joined.finish_creation(others)
    with pytest.raises(IdentityMismatch, match="seed is 0, given 1"):
        write(place, manifest(seed=1))
    write(place, manifest())
    assert validate(place, deep=True) == []
    assert joined.is_created


def test_commands_say_it_in_one_line(faulty: Proxy, url: str) -> None:
    faulty.faults = [Fault("500")]
    for words in (["info", url], ["validate", url], ["attn-dist", url]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 1 and done.stdout == ""
        assert (
            done.stderr.splitlines()[-1].startswith("Error: ")
            or "cannot be read" in done.stderr
        )
        assert "Traceback" not in done.stderr
        assert f"{url} cannot be read: the server answered 500" in done.stderr.replace(
            "\n", " "
        )


def test_a_server_that_is_not_there_is_one_line(
    faulty: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StoreError, match=rf"^{url} cannot be read: cannot connect to 127.0.0.1:9"
    ):
        open_store(url)


def test_denied_access_is_not_tried_again(faulty: Proxy, url: str) -> None:
    faulty.faults = [Fault("403")]
    with pytest.raises(
        StoreError, match=rf"^{url} cannot be read: access is denied \(Access"
    ):
        open_store(url)
    assert len(faulty.requests) == 1


@pytest.mark.parametrize(
    ("text", "said", "final"),
    [
        ("Error performing PUT http://169.254.169.254/latest", "no credentials are set", True),
        ("Generic S3 error: Error performing GET http://h/b/a in 1s, after 0 retries - Server "
         "returned non-2xx status code: 503 Slow Down: <Code>SlowDown</Code>\n\nDebug",
         "the server answered 503 Slow Down (SlowDown)", False),
        ("Generic GCS error: no such thing\nDebug source:", "no such thing", False),
        ("Generic S3 error: x - HTTP error: error sending request\n kind: Connect, uri: "
         "http://h:1/b", "cannot connect to h:1", False),
    ],
)  # fmt: skip
def test_errors_of_obstore_become_parts_of_a_line(
    text: str, said: str, final: bool
) -> None:
    words, is_final = remote._describe_error(GenericError(text))
    assert words.startswith(said) and "\n" not in words and is_final == final

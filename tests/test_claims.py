"""Claims on slabs, and `extract --shard claims` by processes that come and go."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.extractions import VIT, array_bytes, extract, extracted, plant_images
from tests.processes import Server
from vitsee_cli import console
from vitsee_cli.main import main
from vitsee_core.extraction import sharding
from vitsee_core.extraction.outcome import StopRequest
from vitsee_core.extraction.sharding import claimed_rounds
from vitsee_stores import StoreWriter, describe, open_store, validate
from vitsee_stores import leases as claims
from vitsee_stores.disk import tag
from vitsee_stores.folder import Folder
from vitsee_stores.leases import Claims

MakeStore = Callable[..., Path]
N, SLAB = 16, 2


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    (tmp_path / "commits").mkdir()
    return Folder(tmp_path, durable=False)


def claim_files(store: Path) -> list[str]:
    return sorted(path.name for path in store.rglob(".claim*"))


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_nobody_takes_what_another_has(files: Folder) -> None:
    a, b = Claims(files, {}), Claims(files, {})
    first = a.take(range(5), 3)
    assert len(first) == 3 and first == sorted(first)
    second = b.take(range(5), 3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert a.take(range(5), 3) == b.take(range(5), 1) == []
    a.release()
    assert b.take(first, 9) == first
    b.release()
    assert claim_files(files.place) == []


def test_each_begins_somewhere_else(files: Folder) -> None:
    """Else all would ask for the same slab first."""
    begun = set()
    for _ in range(40):
        one = Claims(files, {})
        begun.update(one.take(range(8), 1))
        one.release()
    assert len(begun) > 3


def test_a_claim_that_does_not_change_is_lost(
    files: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the watcher's clock alone; a heartbeat is a change."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(claims, "tag", lambda: "elsewhere-1")  # of another machine
    a, b = Claims(files, {}), Claims(files, {})
    assert a.take([7], 1) == [7]
    for _ in range(3):
        assert b.take([7], 1) == []
        now += claims.LOST_SECONDS - 1
        a.renew()
    assert b.take([7], 1) == []
    now += claims.LOST_SECONDS - 1
    assert b.take([7], 1) == []
    now += 2
    assert b.take([7], 1) == [7]
    assert a.take([7], 1) == []


def test_a_claim_of_an_ended_process_is_lost_at_once(
    files: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tag().split("-")[0]
    with monkeypatch.context() as patched:
        patched.setattr(claims, "tag", lambda: f"{machine}-{ended_process()}")
        assert Claims(files, {}).take([0, 1, 2], 9) == [0, 1, 2]
    assert Claims(files, {}).take([0, 1, 2], 2) == [0, 1]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xff", b"[" * 5000, b'{"process": 3}']
)
def test_a_claim_that_says_nothing_waits_its_time(files: Folder, text: bytes) -> None:
    (files.place / "commits" / ".claim.4.json").write_bytes(text)
    one = Claims(files, {})
    assert one.take([4], 1) == []
    assert one.take([4, 5], 1) == [5]
    assert claims.read_claims(files)[4] in ({}, {"process": 3})


def test_what_is_released_does_not_come_back(files: Folder) -> None:
    one = Claims(files, {})
    with one.beating(seconds=0.01):
        assert one.take([1, 2], 2) == [1, 2]
        before = (files.place / "commits" / ".claim.1.json").read_bytes()
        for _ in range(500):
            if (files.place / "commits" / ".claim.1.json").read_bytes() != before:
                break
            time.sleep(0.01)
        else:
            pytest.fail("no heartbeat")
        one.release()
        time.sleep(0.05)
        assert claim_files(files.place) == []
        assert one.take([3], 1) == [3]
    assert claim_files(files.place) == []


def test_claims_are_no_part_of_a_store(make_store: MakeStore) -> None:
    """Readers, validation and the end of an extraction do not mind them."""
    path = make_store(slabs=[0, 1])
    writer = StoreWriter.join(path, durable=False)
    assert writer is not None
    Claims(writer.files, {"host": "node7", "pid": 5}).take([0, 2], 2)
    assert not any("claim" in line for line in validate(path))
    assert writer.committed().tolist() == [True, True, False]
    assert len(claim_files(path)) == 2
    shown = CliRunner().invoke(main, ["info", str(path)]).stdout
    assert "claimed    slabs 2 by process 5 on node7, last heard of 20" in shown
    assert describe(path)["claimed"][0]["slabs"] == [2]


def test_a_whole_store_keeps_no_claims(make_store: MakeStore) -> None:
    path = make_store()
    writer = StoreWriter.join(path, durable=False)
    assert writer is not None
    Claims(writer.files, {}).take([0, 2], 2)
    assert writer.finish()
    assert claim_files(path) == []


def test_a_signal_ends_the_rounds_and_the_claims(make_store: MakeStore) -> None:
    path = make_store(slabs=[1])
    writer = StoreWriter.join(path, durable=False)
    assert writer is not None
    stop = StopRequest()
    rounds = claimed_rounds(writer, stop)
    assert next(rounds) in ([0], [2])
    assert len(claim_files(path)) == 1
    stop.signal_name = "SIGTERM"
    assert list(rounds) == []
    assert claim_files(path) == []


# whole extractions --------------------------------------------------------------------------------


def options(data: Path, path: Path) -> list[object]:
    return [*VIT, "--data", data, "-o", path, "--slab", SLAB, "--batch-size", 2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("data"), N)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "whole.zarr"
    extracted(*options(data, path))
    return array_bytes(path)


@pytest.mark.slow
def test_two_processes_share_what_is_there(
    run: Server, data: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "s.zarr"
    words = ["extract", *options(data, path), "--shard", "claims"]
    both = [run.start(*words) for _ in range(2)]
    ends = [process.end() for process in both]
    assert [done.code for done in ends] == [0, 0], ends
    assert open_store(path).complete
    assert array_bytes(path) == whole
    assert claim_files(path) == []
    assert {maker["shard"] for maker in describe(path)["made_by"]} == {"claims"}


def test_others_are_looked_at_soon_then_rarely() -> None:
    assert list(islice(sharding.pauses(), 7)) == pytest.approx(
        [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    )


@pytest.mark.slow
def test_a_claim_from_elsewhere_is_waited_for_then_taken(
    data: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.zarr"
    extracted(*options(data, path), "--shard", "0/2")
    elsewhere = json.dumps({"process": "01234567-1", "host": "gone"})
    (path / "commits" / ".claim.3.json").write_text(elsewhere)
    monkeypatch.setattr(claims, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(sharding, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    result = extracted(*options(data, path), "--shard", "claims")
    assert result.stderr.count("batches of 2") == 1  # of four rounds
    assert f"{N}/{N} images" in result.stderr and "0/2 images" not in result.stderr
    assert "waiting for 1 slab that others have claimed" in result.stderr
    assert open_store(path).complete and array_bytes(path) == whole


def test_claims_and_force_exclude_each_other(data: Path, tmp_path: Path) -> None:
    result = extract(*options(data, tmp_path / "s.zarr"), "--shard", "claims", "--force")
    assert result.exit_code == 1
    assert "--force with --shard" in result.stderr


def test_a_planned_array_may_claim(data: Path, tmp_path: Path) -> None:
    words = options(data, tmp_path / "s.zarr")
    script = extracted(*words, "--shard", "claims", "--plan", "slurm").stdout
    assert " --shard claims || code=$?\n" in script and "--shard slurm" not in script

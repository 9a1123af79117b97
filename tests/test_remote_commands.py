"""Every command takes a URL where it takes a store, and its tables are those of the local copy."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import vitsee
from tests.recipes import README, blocks_of
from tests.s3 import download, environment, make_bucket, objects, server, upload
from vitsee_cli import values
from vitsee_cli.main import main
from vitsee_core.extraction import run as extraction
from vitsee_core.extraction.outcome import Outcome
from vitsee_stores import open_store, validate

MakeStore = Callable[..., Path]
URL = "s3://tests/runs"
FIRST_LOOK = "".join(text for language, text in blocks_of(README) if language == "sh")


@pytest.fixture(scope="module", autouse=True)
def bucket() -> Iterator[None]:
    with server() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(port).items():
            patch.setenv(name, value)
        make_bucket(port, "tests")
        yield


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(*words: str) -> Result:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{words}: {done.stderr}"
    return done


@pytest.mark.slow
def test_the_first_look_of_readme_runs_on_urls(tmp_path: Path) -> None:
    """Each as it stands there, but for fewer images and the stores' places."""
    text = re.sub(r"(?<![\w/.])(\w+)\.zarr", rf"{URL}/\1.zarr", FIRST_LOOK).replace(
        "\\\n", " "
    )
    fewer = re.sub(r"--images \d00", "--images 24", text).replace(
        "--shots 10", "--shots 1"
    )
    lines = fewer.strip().splitlines()
    assert sum(URL in line for line in lines) == len(lines) - 1  # report takes a folder
    for line in lines:
        command, _, target = line.partition(" > ")
        done = call(*shlex.split(command.partition(" | ")[0], comments=True)[1:])
        if target:
            (tmp_path / target).write_text(done.stdout)
    assert (tmp_path / "dist.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*s3*")) and not (tmp_path / "vit.zarr").exists()
    # What they wrote is what a folder would hold, and gives the same table there.
    download(f"{URL}/vit.zarr", tmp_path / "vit.zarr")
    assert validate(tmp_path / "vit.zarr", deep=True) == []
    assert (
        call("attn-dist", "vit.zarr").stdout
        == call("attn-dist", f"{URL}/vit.zarr").stdout
    )
    # Gram matrices are on this machine, and found again.
    (kept,) = (tmp_path / "cache" / "vitsee").glob("vit-*.grams")
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(before) > 4
    assert (
        call("cka", f"{URL}/vit.zarr", f"{URL}/resnet.zarr").stdout
        == (tmp_path / "cka.csv").read_text()
    )
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    assert not [name for name in objects(URL) if "grams" in name]


EXTRACT = "extract demo:vit --data demo:test --sites blocks.0.out --attention none"
ANALYSES = [
    "attn-dist {a}",
    "attn-map {a} --kind mean-cls --sites blocks.-1",
    "cka {a} --no-cache",
    "cka-heads {a} other={a} --window 1 --no-cache",
    "cluster {a}",
    "erf {a}",
    "head-types {a}",
    "info {a} -f n_valid",
    "knn {a} other={a} --allow-shared",
    "localize {a} --tokens 0,0",
    "norms {a}",
    "normratio {a} --tokens cls",
    "probe {a} other={a} --allow-shared --shots 1",
    "probe {a} --response {a} --sites blocks.-1.out --folds 2",
    "retrieve {a} --truth labels",
    "similarity {a} --sites first --sites last --no-cache",
    "weights {a} --what positions",
]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every analysis reads, of 40 images."""
    place = tmp_path_factory.mktemp("extracted") / "a.zarr"
    words = "extract demo:vit --data demo:test --images 40 --slab 16 --inputs --erf 4"
    kept = "--sites blocks --sites head --sites heads --attention rows -o"
    call(*words.split(), *kept.split(), str(place))
    upload(place, f"{URL}/a.zarr")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("line", ANALYSES)
def test_a_table_is_that_of_the_local_copy(line: str, extracted: Path) -> None:
    there = call(*shlex.split(line.format(a=f"{URL}/a.zarr"))).stdout
    here = call(*shlex.split(line.format(a=extracted))).stdout
    assert there == here and len(here.splitlines()) >= 1


@pytest.mark.slow
def test_extraction_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """The second call finds the first one's slabs; a third has nothing to do."""
    place = f"{URL}/shards.zarr"
    words = f"{EXTRACT} --images 24 --slab 8 -o {place}".split()
    first = call(*words, "--shard", "0/2")
    assert "is not complete yet" in first.stderr
    assert call("info", place, "-f", "n_committed").stdout == "2\n"
    assert "resuming: 2 of 3 slabs are there" in call(*words).stderr
    assert "is complete (24 images): nothing to do" in call(*words).stderr
    folder = tmp_path / "shards.zarr"
    call(*words[:-1], str(folder))
    np.testing.assert_array_equal(
        open_store(folder).acts("blocks.0.out")[:],
        open_store(place).acts("blocks.0.out")[:],
    )
    again = call(*words, "--force", "--seed", "1")
    assert "24 images" in again.stderr
    assert open_store(place).manifest.identity["seed"] == 1
    assert validate(place, deep=True) == []


@pytest.mark.slow
def test_a_half_made_store_is_finished_by_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import obstore
    from obstore.store import from_url

    place = f"{URL}/half.zarr"
    words = f"{EXTRACT} --images 8 -o {place}".split()
    with monkeypatch.context() as patch:
        patch.setattr(extraction, "fill", lambda *_, **__: Outcome(False))
        call(*words)
    client = from_url(place)
    obstore.delete(
        client, ["commits/zarr.json", "samples/id/c.0.0", "weights/filters/zarr.json"]
    )
    call(*words)
    assert validate(place, deep=True) == []


@pytest.mark.slow
def test_dry_run_names_no_disk() -> None:
    words = "extract demo:vit --data demo:test --images 8 --dry-run -o"
    done = call(*words.split(), f"{URL}/dry.zarr")
    assert f"{URL}/dry.zarr: " in done.stderr.replace("\n", "")
    assert "per image; nothing was written" in " ".join(done.stderr.split())
    assert not objects(f"{URL}/dry.zarr")


@pytest.mark.slow
def test_python_takes_urls(extracted: Path) -> None:
    table = vitsee.attn_dist(f"{URL}/a.zarr", sites="blocks.-1")
    assert (
        table["value"].tolist()
        == vitsee.attn_dist(extracted, sites="blocks.-1")["value"].tolist()
    )
    store = vitsee.extract(
        "demo:vit", "demo:test", f"{URL}/py.zarr", images=4, sites="blocks"
    )
    assert store.complete and store.label == "py" and os.listdir() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "info http://host/a.zarr",
            "stores are in folders or at URLs with s3://, gs://, az://",
        ),
        ("cka s3://bucket", "names no store; expected s3://BUCKET/FOLDER/NAME.zarr"),
        ("extract demo:vit --data demo:test -o s3://bucket/", "names no store"),
        (
            "attn-dist a.zarr -o s3://b/x.csv",
            "is a URL, which only stores have; expected a path",
        ),
        ("attn-dist a.zarr --png s3://b/x.png", "is a URL, which only stores have"),
        ("cka a.zarr --cache s3://b/grams", "is a URL, which only stores have"),
    ],
)
def test_a_url_that_names_no_store_is_a_usage_error(words: str, said: str) -> None:
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 2 and done.stdout == ""
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_every_argument_that_is_a_store_takes_urls() -> None:
    """By the names that help gives them: STORE, TRAIN, TEST."""
    found = {}
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.params:
            metavar = parameter.metavar or ""
            if re.search(r"STORE|TRAIN|TEST\b", metavar) and "MODEL" not in metavar:
                found[name, metavar] = isinstance(parameter.type, values.PlaceType)
    assert len(found) > 15
    assert [key for key, takes in found.items() if not takes] == []

"""Images at URLs: the folder's images, byte for byte, from a bucket, a web server and a data set of
the hub; with a server that fails, hangs and sends too little."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner

from tests.clip_files import write_video
from tests.s3 import HOST, Fault, Proxy, environment, make_bucket, proxy, server, upload
from tests.shards import (
    make_images,
    with_labels,
    write_folder,
    write_parquet,
    write_shards,
    write_tar,
)
from tests.test_images_shards import assert_same
from vitsee_cli.main import main
from vitsee_core.images import DataError, batches, open_source, select
from vitsee_core.images.sources import archives
from vitsee_stores import objects as remote
from vitsee_stores import open_store, require_paired

IMAGES = make_images()
TRANSFORM = {
    "input_size": (3, 8, 8), "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "center",
    "mean": (0.5,), "std": (0.5,),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data to upload: a folder of images, tar shards and parquet files."""
    made = tmp_path_factory.mktemp("data")
    write_folder(made / "folder", IMAGES)
    write_shards(made / "shards", IMAGES, 8)
    for k in range(3):
        write_video(made / "clips" / f"class{k % 2}" / f"{k}.mp4", 8)
    half = list(IMAGES.items())
    write_parquet(made / "data" / "a.parquet", dict(half[:10]))
    write_parquet(made / "data" / "b.parquet", dict(half[10:]))
    return made


@pytest.fixture(scope="module")
def port(root: Path) -> Iterator[int]:
    with server() as number, pytest.MonkeyPatch.context() as patch:
        make_bucket(number, "tests")
        for name, value in environment(number).items():
            patch.setenv(name, value)
        upload(root, "s3://tests/in1k")
        yield number


@pytest.fixture
def faulty(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """What stands between images and the bucket."""
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with proxy(port) as made:
        for name, value in environment(made.server_port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_TIMEOUT", "20s")  # on a machine that does much else
        yield made


FORMS = (
    "folder", "shards", "shards/in1k-{0000..0007}.tar", "shards/*.tar", "data/*.parquet", "data",
    "folder/c*/*.png",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_bucket_has_the_images_of_the_folder(
    form: str, faulty: Proxy, root: Path
) -> None:
    assert_same(open_source(f"s3://tests/in1k/{form}"), open_source(str(root / "folder")))


@pytest.mark.slow
def test_videos_from_a_bucket_are_those_of_the_folder(faulty: Proxy, root: Path) -> None:
    about = {**TRANSFORM, "clip": {"frames": 4}}
    found = []
    for data in (str(root / "clips"), "s3://tests/in1k/clips"):
        selection = select(open_source(data, clips=True), order="dataset")
        (batch,) = batches(selection, about, [slice(0, 3)])
        assert batch.valid.all(), batch.errors
        found.append(
            (selection.samples.ids, batch.hash.tolist(), batch.pixels.numpy().tobytes())
        )
    assert found[0] == found[1]


def test_a_list_of_urls(faulty: Proxy, root: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(
        "s3://tests/in1k/shards/in1k-000{0..3}.tar\ns3://tests/in1k/shards/*[4-7].tar"
    )
    assert_same(open_source(str(listed)), open_source(str(root / "folder")))


def test_only_headers_and_images_are_read(
    faulty: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of large members nothing but the header, and an index that is kept asks for no header."""
    monkeypatch.setattr(archives, "CACHE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("vitsee_core.images.sources.tar_index.REMOTE_WINDOW", 4096)
    members = [(f"{k}.bin", bytes(300_000)) for k in range(3)] + with_labels(IMAGES)[:2]
    write_tar(tmp_path / "up" / "a.tar", members)
    upload(tmp_path / "up", "s3://tests/large")
    faulty.requests.clear()
    source = open_source("s3://tests/large/a.tar")
    assert len([r for r in faulty.requests if r.startswith("GET")]) == 4
    faulty.requests.clear()
    assert list(open_source("s3://tests/large/a.tar").ids) == list(source.ids)
    assert [r.split()[0] for r in faulty.requests] == ["HEAD"]
    source.read(0)
    assert len(faulty.requests) == 2
    upload(write_folder(tmp_path / "new", {"a.tar": b"x" * 1000}), "s3://tests/large")
    with pytest.raises(DataError, match=r"a\.tar cannot be read as an uncompressed tar"):
        open_source("s3://tests/large/a.tar")  # the index was of other bytes


def extract(data: str, store: Path, *more: str) -> Any:
    words = ["extract", "demo:vit", "--data", data, "-o", str(store), "--slab", "8"]
    return CliRunner().invoke(main, [*words, "--tokens", "pooled", *more])


@pytest.mark.slow
def test_stores_from_a_bucket_pair_with_the_folders(
    faulty: Proxy, root: Path, tmp_path: Path
) -> None:
    """Half of the answers fail once; workers ask for themselves."""
    faulty.faults = [Fault("500", lambda method, path: hash(path) % 2 == 0, times=1)]
    forms = ("shards/*.tar", "data/*.parquet", "folder")
    for k, data in enumerate(
        [str(root / "folder"), *(f"s3://tests/in1k/{f}" for f in forms)]
    ):
        done = extract(data, tmp_path / f"{k}.zarr", "--workers", str(2 * (k % 2)))
        assert done.exit_code == 0, done.output
    stores = [open_store(tmp_path / f"{k}.zarr") for k in range(4)]
    for store in stores[1:]:
        assert require_paired(stores[0], store).all()
        for site in ("embed", "blocks.1.out"):
            assert (
                store.pooled(site, "cls")[:] == stores[0].pooled(site, "cls")[:]
            ).all()
    # A store does not choose a server by itself.
    words = [
        "attn-map",
        str(tmp_path / "1.zarr"),
        "--image",
        "0",
        "-o",
        str(tmp_path / "m.csv"),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert (
        "was made from s3://tests/in1k/shards/*.tar, which a store may not open"
        in done.stderr
    )


@pytest.mark.slow
def test_a_server_that_stays_silent_ends_the_extraction_not_the_image(
    faulty: Proxy, root: Path, tmp_path: Path
) -> None:
    """What was committed stays, and the same command goes on."""
    path = "/in1k/shards/in1k-0003.tar"
    data = "s3://tests/in1k/shards/*.tar"
    open_source(data)
    broken = Fault("500", lambda method, p: p.endswith(path) and method == "GET")
    for workers in ("0", "1"):
        store = tmp_path / f"{workers}.zarr"
        gets = Counter[str]()

        def late(method: str, p: str, gets: Counter[str] = gets) -> bool:
            """The tar's headers come, and the first of its images."""
            gets[p] += method == "GET"
            return p.endswith(path) and method == "GET" and gets[p] > 2

        faulty.faults = [Fault("500", late)]
        done = extract(data, store, "--workers", workers)
        assert done.exit_code == 1, done.output
        assert re.search(
            r"an image cannot be read: the server answered 500 .* \(3 tries\); what was committed "
            r"is kept: repeat the command",
            " ".join(done.stderr.split()),
        ), done.stderr
        faulty.faults = []
        assert extract(data, store, "--workers", workers).exit_code == 0
        assert open_store(store).valid.all()
    faulty.faults = [broken]
    with pytest.raises(
        DataError, match=r"in1k-0003.tar cannot be read: the server .*3 tries"
    ):
        open_source(data)


@pytest.mark.parametrize(
    "what", ["500", "cut", "lost", pytest.param("slow", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", ["shards/*.tar", "data/*.parquet", "folder"])
def test_every_request_fails_at_first(
    what: str, form: str, faulty: Proxy, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "slow":
        monkeypatch.setenv("AWS_TIMEOUT", "3s")
        faulty.patience = 3.5
    times = 1 if what == "slow" else 2
    faulty.faults = [Fault(what, lambda method, path: method == "GET", times=times)]
    selection = select(open_source(f"s3://tests/in1k/{form}"), images=12)
    expected = select(open_source(str(root / "folder")), images=12)
    for ours, theirs in zip(
        batches(selection, TRANSFORM, [slice(0, 12)]),
        batches(expected, TRANSFORM, [slice(0, 12)]),
        strict=True,
    ):
        assert (ours.pixels == theirs.pixels).all() and (ours.hash == theirs.hash).all()
        assert not ours.errors


def test_too_few_bytes_are_asked_for_again(
    faulty: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends less than a range, and calls it whole."""
    source = open_source("s3://tests/in1k/shards/*.tar")
    get_range, sent = obstore.get_range, []

    def short(*args: Any, **options: Any) -> Any:
        sent.append(options)
        data = get_range(*args, **options)
        return data if len(sent) == 3 else bytes(data)[:-1]

    monkeypatch.setattr(obstore, "get_range", short)
    assert source.read(0)[0].size == (15, 12) and len(sent) == 3
    monkeypatch.setattr(obstore, "get_range", lambda *_, **__: b"x")
    with pytest.raises(DataError, match=r"the server sent 1 of .* bytes \(3 tries"):
        source.read(0)


WRONG = {
    "s3://tests/in1k/none/*.tar": "none/.*.tar matches nothing; expected files there",
    "s3://tests/in1k/shards/x.tar": "cannot read s3://tests/in1k/shards/x.tar: no such object",
    "s3://tests/empty": "s3://tests/empty matches nothing",
    "s3://absent/in1k": "s3://absent/in1k cannot be read: there is no such bucket",
    "s3://tests/in1k/list.csv": "only images, .tar and .parquet files are read at URLs",
    "s3://tests/in1k/a.tar.gz": "compressed, without random access",
    "s3://tests/in1k/folder/c0/000.png": "is a single file; expected its folder",
}


@pytest.mark.parametrize("url", WRONG)
def test_wrong_urls_are_one_line(url: str, faulty: Proxy) -> None:
    with pytest.raises(DataError, match=WRONG[url]) as raised:
        open_source(url)
    assert "\n" not in str(raised.value)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vitsee_core.images.sources.remote.importlib.util.find_spec", lambda _: None
    )
    with pytest.raises(
        DataError, match=r"needs obstore; run: pip install 'vitsee\[remote\]'"
    ):
        open_source("s3://tests/a.tar")


# web servers and the hub ----------------------------------------------------------------------


class _Site(http.server.SimpleHTTPRequestHandler):
    """Files with ranges, and the hub's list of a data set."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/org/pets/tree/"):
            below = self.path.partition("/tree/main")[2].partition("?")[0].lstrip("/")
            root = Path(self.directory, "datasets/org/pets/resolve/main")
            files = [p for p in sorted((root / below).rglob("*")) if p.is_file()]
            listed = [
                {
                    "type": "file",
                    "path": p.relative_to(root).as_posix(),
                    "size": 1,
                    "oid": "0",
                }
                for p in files
            ]
            self._send(
                200, json.dumps(listed).encode(), {"Content-Type": "application/json"}
            )
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self._send(404, b"", {})
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._send(200, data, {})
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        about = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._send(206, data[start:stop], about)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def site(root: Path) -> Iterator[str]:
    """A web server that has the images below `data`, and is a hub with a data set of them."""
    top = root.parent / "site"
    place = top / "datasets" / "org" / "pets" / "resolve"
    place.mkdir(parents=True)
    (place / "main").symlink_to(root)
    with http.server.ThreadingHTTPServer(
        (HOST, 0), functools.partial(_Site, directory=str(top))
    ) as made:
        thread = threading.Thread(
            target=made.serve_forever, kwargs={"poll_interval": 0.02}
        )
        thread.start()
        yield f"http://{HOST}:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_web_server(site: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", HOST)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    folder = open_source(str(root / "folder"))
    below = f"{site}/datasets/org/pets/resolve/main"
    for form in ("shards/in1k-{0000..0007}.tar", "data/{a,b}.parquet"):
        assert_same(open_source(f"{below}/{form}"), folder)
    with pytest.raises(
        DataError, match="cannot be listed: a web server has no list; name its fil"
    ):
        open_source(f"{below}/shards/*.tar")
    with pytest.raises(DataError, match=r"cannot read .*/x.tar: no such object"):
        open_source(f"{below}/x.tar")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["data", "shards/*.tar", "folder", "@main/data/*.parquet"]
)
def test_a_data_set_of_the_hub(
    form: str, site: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", HOST)
    monkeypatch.setenv("HF_ENDPOINT", site)
    monkeypatch.setenv("HF_TOKEN", "secret")
    url = (
        f"hf://datasets/org/pets{form}"
        if form[0] == "@"
        else f"hf://datasets/org/pets/{form}"
    )
    assert_same(open_source(url), open_source(str(root / "folder")))

"""An S3 server on this machine, and a proxy before it that makes the faults a test asks for."""

from __future__ import annotations

import http.client
import http.server
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import from_url

HOST = "127.0.0.1"


@contextmanager
def server() -> Iterator[int]:
    """The port of a server that holds nothing yet."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    moto.start()
    try:
        yield moto.get_host_and_port()[1]
    finally:
        moto.stop()


def make_bucket(port: int, name: str) -> None:
    request = urllib.request.Request(f"http://{HOST}:{port}/{name}", method="PUT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(request).close()


def environment(port: int) -> dict[str, str]:
    """What obstore, and every tool of AWS, finds the server by. Requests wait two seconds."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_TIMEOUT": "2s",
        "NO_PROXY": HOST,
    }


def upload(folder: Path, url: str) -> None:
    """Copy every file below a folder, as any tool does."""
    client = from_url(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        obstore.put(client, path.relative_to(folder).as_posix(), path.read_bytes())


def objects(url: str) -> dict[str, bytes]:
    """Every object below a URL."""
    client = from_url(url)
    paths = [entry["path"] for page in obstore.list(client) for entry in page]
    return {path: bytes(obstore.get(client, path).bytes()) for path in paths}


def download(url: str, folder: Path) -> None:
    for name, data in objects(url).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@dataclass
class Fault:
    """what: `500`, `403` (answered so, not passed on), `slow` (answered after the proxy's
    `patience`), `cut` (half the body), `lost` (passed on, the connection closed as the answer).
    of: method and path of the requests it meets; times: how many of each path."""

    what: str
    of: Callable[[str, str], bool] = lambda method, path: True
    times: int = 1 << 30
    seen: dict[str, int] = field(default_factory=dict)

    def meets(self, method: str, path: str) -> bool:
        if not self.of(method, path):
            return False
        key = f"{method} {path}"
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.seen[key] <= self.times


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a port, but for `faults`."""

    daemon_threads = True

    def __init__(self, target: int):
        super().__init__((HOST, 0), partial(_Handler))
        self.target = target
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.patience = 2.5

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client went away, as tests make it do."""


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    made = Proxy(target)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        fault = next(
            (f for f in self.server.faults if f.meets(self.command, self.path)), None
        )
        what = fault.what if fault else ""
        if what in _ANSWERS:
            self._answer(
                int(what), {}, f"<Error><Code>{_ANSWERS[what]}</Code></Error>".encode()
            )
            return
        if what == "slow":
            time.sleep(self.server.patience)
        upstream = http.client.HTTPConnection(HOST, self.server.target)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        data = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() in _KEPT}
        upstream.close()
        if what == "lost":
            self.close_connection = True
            return
        self._answer(answer.status, headers, data, cut=what == "cut")

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, cut: bool = False
    ) -> None:
        self.send_response(status)
        length = {k.lower(): v for k, v in headers.items()}.get(
            "content-length", str(len(data))
        )
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


_ANSWERS = {"500": "InternalError", "403": "AccessDenied"}
_KEPT = {"etag", "last-modified", "content-type", "content-length", "content-range"}

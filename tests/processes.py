"""Real processes that begin at once: forked from one that has imported everything.

`python -m tests.processes` reads a request per line and answers with a line: it forks a
`vitsee` command, waits for one, or mounts a small disk. It runs in a mount namespace of its own
where the machine grants one, so that a disk is gone with it, whatever happens to the tests.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNSHARED: tuple[list[str], ...] = (
    ["unshare", "--mount"],
    ["unshare", "--map-root-user", "--mount"],
    [],
)


@dataclass
class Ended:
    """How a process ended; code: negative for the signal that ended it."""

    code: int
    stdout: str
    stderr: str


class Process:
    """One command; its streams go to files beside each other."""

    def __init__(self, server: Server, pid: int, out: Path, err: Path):
        self.server, self.pid, self.out, self.err = server, pid, out, err
        self._ended: Ended | None = None

    def running(self) -> bool:
        """Whether it is."""
        if self._ended is None:
            self._note(self.server.ask(poll=self.pid))
        return self._ended is None

    def end(self) -> Ended:
        """Wait for it."""
        if self._ended is None:
            self._note(self.server.ask(wait=self.pid))
        assert self._ended is not None
        return self._ended

    def kill(self, sent: signal.Signals = signal.SIGKILL) -> Ended:
        """Send a signal, if it still runs, and wait."""
        if self.running():
            os.kill(self.pid, sent)
        return self.end()

    def _note(self, code: int | None) -> None:
        if code is not None:
            self._ended = Ended(code, self.out.read_text(), self.err.read_text())


class Server:
    """What forks. mounts: whether it may make disks of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path):
        self._process, self._folder, self._number = process, folder, 0
        self.mounts: bool = self.ask(mounts=True)

    def ask(self, **request: Any) -> Any:
        """One request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, dict):
            raise OSError(answer["error"])
        return answer

    def start(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        before: str = "",
        fsync: bool = False,
    ) -> Process:
        """`vitsee WORDS`; before: `module:function` to call in the process first. Without
        `fsync` it does not wait for the disk: SIGKILL takes nothing from the page cache."""
        self._number += 1
        out, err = (self._folder / f"{self._number}.{kind}" for kind in ("out", "err"))
        words = tuple(map(str, words))
        pid = self.ask(
            start=words,
            out=str(out),
            err=str(err),
            env=dict(env or {}),
            before=before,
            fsync=fsync,
        )
        return Process(self, pid, out, err)

    def run(self, *words: object, **more: Any) -> Ended:
        """As `start`, to the end."""
        return self.start(*words, **more).end()

    def mount(self, place: Path, megabytes: float) -> Path:
        """A disk of this size at `place`; where it is for others."""
        size = f"size={megabytes * 2**20:.0f}"
        self.ask(call=["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)])
        return Path(f"/proc/{self._process.pid}/root{place.absolute()}")

    def remount(self, place: Path, option: str) -> bool:
        """`ro` or `rw`; False where a process is writing to it at this moment."""
        try:
            self.ask(call=["mount", "-o", f"remount,{option}", str(place)])
        except OSError:
            return False
        return True

    def unmount(self, place: Path) -> None:
        """Once nobody uses it."""
        self.ask(call=["umount", str(place)])


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """What forks, until the end of the context; streams go below `folder`."""
    paths = [str(ROOT), str(ROOT / "cli"), str(ROOT / "stores")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.processes"]
    unshared = next(more for more in UNSHARED if _works([*more, "true"]))
    process = subprocess.Popen(
        [*unshared, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**env, "VITSEE_UNSHARED": str(bool(unshared))},
    )
    try:
        yield Server(process, folder)
    finally:
        process.communicate()  # ends with its stdin


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# the process itself -------------------------------------------------------------------------------


def _call(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())


def _waited(pid: int, flag: int) -> int | None:
    found, status = os.waitpid(pid, flag)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(request: Mapping[str, Any]) -> None:
    """What a forked process does before the command."""
    for path, descriptor in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(request["env"])
    if not request["fsync"]:
        os.fsync = lambda fd: None
    if request["before"]:
        module, _, function = request["before"].partition(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = ["vitsee", *request["start"]]


def serve() -> bool:
    """Answer requests until there are no more (False), or as a forked process (True)."""
    answers = os.fdopen(os.dup(1), "w")
    for line in os.fdopen(os.dup(0)):
        request = json.loads(line)
        answer: Any = None
        try:
            if "start" in request:
                answer = os.fork()
                if not answer:
                    _become(request)
                    return True
            elif "call" in request:
                _call(request["call"])
            elif "mounts" in request:
                answer = os.environ["VITSEE_UNSHARED"] == "True"
            else:
                flag = os.WNOHANG if "poll" in request else 0
                answer = _waited(request.get("poll", request.get("wait")), flag)
        except OSError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return False


def _command() -> int:
    """The exit code of `vitsee`, as the interpreter would give it."""
    from vitsee_cli.__main__ import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    importlib.import_module("tests.preloaded")
    # Collecting what was imported, and taking it down at the end, would copy most of its memory:
    # more than a second of each process.
    gc.freeze()
    ended = _command() if serve() else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)

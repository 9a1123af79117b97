"""Advisory claims: which process is making which slab, if shards are not numbered.

A claim is a hidden file beside the slab's commit marker. Readers and commits ignore it: two
processes on one slab cost double work and never wrong bytes, so nothing here has to be certain.
Clocks are never compared: a claim is lost once it has not changed for a while by the watcher's own
clock, or at once if its process ran on this machine and has ended.
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitsee_stores.disk import has_ended, tag
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.files import Files

log = logging.getLogger(__name__)

FOLDER = "commits"
BEAT_SECONDS = 20.0
LOST_SECONDS = 180.0  # several heartbeats, which a busy file system may delay
_LARGEST = 4096


class Claims:
    """The claims of one process on slabs of one store.

    Attributes:
        about: description of the process that each claim records, JSON-compatible. Coordinated
            processes share the same `run` there: each takes over the others' claims at once.
    """

    def __init__(self, files: Files, about: Mapping[str, Any]):
        self.files = files
        self._about = {**about, "process": tag(), "claimant": secrets.token_hex(8)}
        self._held: set[int] = set()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._beats = 0

    def take(self, slabs: Sequence[int], max_slabs: int) -> list[int]:
        """Claim up to `max_slabs` of these slabs.

        Unclaimed slabs are taken first; if there are none, slabs whose claims are lost.

        Returns:
            The claimed slabs; [] if others have claimed them all.

        Raises:
            StoreError: claims cannot be written to the store.
        """
        try:
            claimed = _claimed(self.files)
            free = [slab for slab in slabs if slab not in claimed]
            # A random start avoids contention with other claimants.
            start = random.randrange(len(free)) if free else 0
            taken = self._put(free[start:] + free[:start], max_slabs)
            if not taken:
                lost = [
                    slab for slab in slabs if slab in claimed and self._is_lost(slab)
                ][:max_slabs]
                self.files.remove([_name(slab) for slab in lost])
                taken = self._put(lost, max_slabs)
        except OSError as error:
            raise StoreError(
                f"cannot claim slabs of {self.files}: {reason(error)}"
            ) from None
        return sorted(taken)

    def release(self) -> None:
        """Release all held claims. On failure they expire after a while."""
        with self._lock:
            slabs = self._held
            self._held = set()
        try:
            self.files.remove([_name(slab) for slab in slabs])
        except OSError as error:
            log.debug("claims stay: %s", reason(error))

    @contextmanager
    def beating(self, seconds: float = BEAT_SECONDS) -> Iterator[None]:
        """Context in which a thread renews the held claims; they are released at the end."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(seconds):
                self.renew()

        thread = threading.Thread(target=run, name="vitsee-claims", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.release()

    def renew(self) -> None:
        """Renew all held claims. On failure others may consider them lost."""
        self._beats += 1
        with self._lock:  # a released claim does not come back
            for slab in self._held:
                try:
                    self.files.put(_name(slab), self._text())
                except OSError as error:
                    log.debug("slab %d: no heartbeat: %s", slab, reason(error))

    def _put(self, slabs: Sequence[int], max_slabs: int) -> list[int]:
        """Write claims on the first `max_slabs` of these slabs that nobody has claimed."""
        taken: list[int] = []
        for slab in slabs:
            if len(taken) == max_slabs:
                break
            if self.files.put_if_absent(_name(slab), self._text()):
                taken.append(slab)
                with self._lock:
                    self._held.add(slab)
        return taken

    def _text(self) -> bytes:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps({**self._about, "beat": self._beats, "time": now}).encode()

    def _is_lost(self, slab: int) -> bool:
        """Return whether the claim on a slab may be taken over.

        It may if its process has ended, if it is of the same run, or if it has not changed for
        `LOST_SECONDS` of this process' clock.
        """
        try:
            data = self.files.read(_name(slab), _LARGEST)
        except FileNotFoundError:
            return True
        except OSError:  # too large, not to be read: nobody renews it
            data = b""
        record = _parsed(data)
        run = self._about.get("run")
        if has_ended(str(record.get("process", ""))) or (
            run and record.get("run") == run
        ):
            return True
        now = time.monotonic()
        before, since = self._seen.get(slab, (None, now))
        if before != data:
            since = now
        self._seen[slab] = data, since
        return now - since > LOST_SECONDS


def claims_of(files: Files) -> dict[int, dict[str, Any]]:
    """The recorded claims by slab; {} for an unreadable one. Raises OSError: the store cannot be
    listed."""

    def read(slab: int) -> dict[str, Any]:
        try:
            return _parsed(files.read(_name(slab), _LARGEST))
        except OSError:
            return {}

    slabs = sorted(_claimed(files))
    return dict(zip(slabs, files.each_small(read, slabs), strict=True))


def remove_claims(files: Files) -> None:
    """Remove all claims, of a complete store. Raises OSError: the disk fails."""
    files.remove([_name(slab) for slab in _claimed(files)])


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _name(slab: int) -> str:
    return f"{FOLDER}/.claim.{slab}.json"


def _claimed(files: Files) -> set[int]:
    matches = (
        re.fullmatch(r"\.claim\.(0|[1-9]\d{0,9})\.json", n) for n in files.names(FOLDER)
    )
    return {int(match[1]) for match in matches if match}

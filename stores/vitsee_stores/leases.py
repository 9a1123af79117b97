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
MAX_BYTES = 4096  # of a claim; ours have some hundred


class Claims:
    """The claims of one process on slabs of one store.

    Attributes:
        files: the files of the store.

    Args:
        description: what each claim records of this process, JSON-compatible. Processes that one
            program starts share the value of "run": each takes over the others' claims at once.
    """

    def __init__(self, files: Files, description: Mapping[str, Any]):
        self.files = files
        self._record = {
            **description,
            "process": tag(),
            "claimant": secrets.token_hex(8),
        }
        self._claimed: set[int] = set()
        # Slab -> bytes of another process' claim, and when this process first read these.
        self._last_change: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()  # of `_claimed`, which the heartbeat's thread reads
        self._n_beats = 0

    def take(self, slabs: Sequence[int], max_slabs: int) -> list[int]:
        """Claim up to `max_slabs` of these slabs.

        Unclaimed slabs are taken first; if there are none, slabs whose claims are lost.

        Returns:
            The claimed slabs; [] if others have claimed them all.

        Raises:
            StoreError: claims cannot be written to the store.
        """
        try:
            claimed = _list_claimed_slabs(self.files)
            free = [slab for slab in slabs if slab not in claimed]
            # A random start avoids contention with other claimants.
            start = random.randrange(len(free)) if free else 0
            taken = self._write_claims(free[start:] + free[:start], max_slabs)
            if not taken:
                lost = [slab for slab in slabs if slab in claimed and self._is_lost(slab)]
                lost = lost[:max_slabs]
                # Removed, not replaced: of several processes that see the loss, the one that
                # writes first has the slab.
                self.files.remove([_claim_name(slab) for slab in lost])
                taken = self._write_claims(lost, max_slabs)
        except OSError as error:
            raise StoreError(
                f"cannot claim slabs of {self.files}: {reason(error)}"
            ) from None
        return sorted(taken)

    def release(self) -> None:
        """Remove the claims of this process. If that fails they expire after a while."""
        with self._lock:
            slabs = self._claimed
            self._claimed = set()
        try:
            self.files.remove([_claim_name(slab) for slab in slabs])
        except OSError as error:
            log.debug("claims stay: %s", reason(error))

    @contextmanager
    def beating(self, seconds: float = BEAT_SECONDS) -> Iterator[None]:
        """Return a context in which a thread renews the claims; they are released at the end."""
        ended = threading.Event()

        def renew_until_ended() -> None:
            """Renew the claims every `seconds`; return within a renewal of the context's end."""
            while not ended.wait(seconds):
                self.renew()

        thread = threading.Thread(
            target=renew_until_ended, name="vitsee-claims", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.release()

    def renew(self) -> None:
        """Write all claims of this process again. If that fails others may consider them lost."""
        self._n_beats += 1
        # Locked while writing, so that a claim that is released meanwhile does not come back.
        with self._lock:
            for slab in self._claimed:
                try:
                    self.files.put(_claim_name(slab), self._encode_claim())
                except OSError as error:
                    log.debug("slab %d: no heartbeat: %s", slab, reason(error))

    def _write_claims(self, slabs: Sequence[int], max_slabs: int) -> list[int]:
        """Write claims on the first `max_slabs` of these slabs that nobody has claimed."""
        taken: list[int] = []
        for slab in slabs:
            if len(taken) == max_slabs:
                break
            if self.files.put_if_absent(_claim_name(slab), self._encode_claim()):
                taken.append(slab)
                with self._lock:
                    self._claimed.add(slab)
        return taken

    def _encode_claim(self) -> bytes:
        """Return a claim as JSON; its heartbeat makes it differ from the one before."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        claim = {**self._record, "beat": self._n_beats, "time": now}
        return json.dumps(claim).encode()

    def _is_lost(self, slab: int) -> bool:
        """Return whether the claim on a slab may be taken over.

        It may if its process has ended, if it is of the same run, or if it has not changed for
        `LOST_SECONDS` of this process' clock.
        """
        try:
            data = self.files.read(_claim_name(slab), MAX_BYTES)
        except FileNotFoundError:
            return True
        except OSError:
            data = b""  # too large or unreadable: lost if that does not change
        record = _parse_claim(data)
        if has_ended(str(record.get("process", ""))):
            return True
        run = self._record.get("run")
        if run and record.get("run") == run:
            return True
        now = time.monotonic()
        last_data, since = self._last_change.get(slab, (None, now))
        if last_data != data:
            since = now
        self._last_change[slab] = data, since
        return now - since > LOST_SECONDS


def read_claims(files: Files) -> dict[int, dict[str, Any]]:
    """Return slab -> its claim; {} for an unreadable one.

    Raises:
        OSError: the store cannot be listed.
    """

    def read_claim(slab: int) -> dict[str, Any]:
        """Return the claim on a slab; {} if it is unreadable or was released meanwhile."""
        try:
            return _parse_claim(files.read(_claim_name(slab), MAX_BYTES))
        except OSError:
            return {}

    slabs = sorted(_list_claimed_slabs(files))
    return dict(zip(slabs, files.each_small(read_claim, slabs), strict=True))


def remove_claims(files: Files) -> None:
    """Remove all claims on slabs of a complete store.

    Raises:
        OSError: the disk fails.
    """
    files.remove([_claim_name(slab) for slab in _list_claimed_slabs(files)])


def _parse_claim(data: bytes) -> dict[str, Any]:
    """Return a claim's JSON object; {} for anything else, which may be a stranger's file."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _claim_name(slab: int) -> str:
    """Return the path of a slab's claim, below the store."""
    return f"{FOLDER}/.claim.{slab}.json"


def _list_claimed_slabs(files: Files) -> set[int]:
    """Return the slabs on which anyone has a claim, lost or not."""
    slabs = set()
    for name in files.names(FOLDER):
        match = re.fullmatch(r"\.claim\.(0|[1-9]\d{0,9})\.json", name)
        if match:
            slabs.add(int(match[1]))
    return slabs

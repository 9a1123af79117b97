"""A loading worker's life: receive tasks, fill shared memory, until the socket is closed."""

from __future__ import annotations

import pickle
import warnings
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vitsee_core.images.openers import load_into

if TYPE_CHECKING:
    from vitsee_core.images.openers import Opener
    from vitsee_core.images.shared import SharedBlock
    from vitsee_core.images.transform import Recipe


def main(fd: int) -> None:
    """Serve the parent at the other end of the socket `fd`; returns when it is gone."""
    # Pillow warns about odd metadata of single files; with several workers that is noise.
    warnings.simplefilter("ignore")
    socket = Connection(fd)
    try:
        opener, recipe, ring = pickle.loads(socket.recv_bytes())
        while True:
            _serve(socket, opener, recipe, ring)
    except (EOFError, ConnectionError):
        return


def _serve(socket: Connection, opener: Opener, recipe: Recipe, ring: SharedBlock) -> None:
    number, start, offset, locations = socket.recv()
    out = ring.array((len(locations), *recipe.shape), offset)
    socket.send((number, start, *load_into(out, opener, locations, recipe)))

"""Manifests changed on disk, as another version of the package might have written them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitsee_stores import metadata
from vitsee_stores.manifest import ATTRIBUTE


@contextmanager
def edited(store: Path, sealed: bool = True) -> Iterator[dict[str, Any]]:
    """The manifest, written back with a digest of what it then is (unless not `sealed`)."""
    document = json.loads((store / metadata.ZARR_JSON).read_text())
    data = document["attributes"][ATTRIBUTE]
    yield data
    if sealed:
        document["attributes"][ATTRIBUTE] = metadata.with_digest(data)
    (store / metadata.ZARR_JSON).write_text(json.dumps(document))

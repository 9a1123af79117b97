"""The place that timm loads pretrained weights from: this machine only, or the network if it
answers."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vitsee_core.models.hook_points import ModelError

PROBE_SECONDS = 5.0

log = logging.getLogger(__name__)


class NotHere(ModelError):
    """Weights that this machine does not have."""


@contextmanager
def local_only() -> Iterator[None]:
    """A context in which timm uses its caches and no network.

    timm has no switch for it, so its two ways out, downloads from the hub and from an address,
    are closed where timm calls them.
    """
    import torch.hub

    hub: Any = importlib.import_module("timm.models._hub")

    def refuse(url: str, *_: Any, **__: Any) -> None:
        raise NotHere(f"{Path(str(url)).name} is not on this machine")

    cached = functools.partial(hub.hf_hub_download, local_files_only=True)
    with (
        mock.patch.object(hub, "hf_hub_download", cached),
        mock.patch.object(hub, "download_url_to_file", refuse),
        mock.patch.object(torch.hub, "download_url_to_file", refuse),
    ):
        yield


def needs_network(full: str, pretrained: bool) -> bool:
    """Whether the hub may be asked for this model's configuration or weights."""
    if full.startswith("local-dir:"):
        return False
    return pretrained or full.startswith(("hf-hub:", "hf_hub:"))


def why_unreachable() -> str | None:
    """Why the hub does not answer, found out once within seconds; None if it does.

    Without this the hub's own client retries each file for half a minute.
    """
    from huggingface_hub import constants, utils

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        session: Any = utils.get_session()  # type: ignore[attr-defined]
        session.head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:
        log.debug("%s: %s", constants.ENDPOINT, error)
        return f"{constants.ENDPOINT} does not answer: {type(error).__name__}"
    return None

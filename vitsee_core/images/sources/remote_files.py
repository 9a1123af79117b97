"""Files at URLs that are only read: those of web servers, and of data sets on the hub."""

from __future__ import annotations

import errno
import os
from typing import Any

from obstore.store import HTTPStore

from vitsee_stores.files import NoAnswer
from vitsee_stores.objects import Objects

_NO_RETRY: Any = {"max_retries": 0}  # `Objects` retries already


class Web(Objects):
    """A folder of a web server, which cannot be listed."""

    def listed(self) -> list[str]:
        """Raise OSError: a web server has no list of its files."""
        raise OSError(
            errno.ENOTSUP,
            "a web server has no list; name its files, with braces: {0000..0063}",
        )

    @property
    def _client(self) -> Any:
        if self._opened is None:
            self._opened = _http(str(self.place))
        return self._opened


class Hub(Web):
    """A data set on the Hugging Face hub, or a folder of it, at OWNER/NAME or OWNER/NAME@REVISION.

    The token is the one that huggingface_hub finds.
    """

    def listed(self) -> list[str]:
        """Return the paths of all files below the folder; raise NoAnswer if the hub has no list."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        name, revision = self._name_and_revision()
        folder = self.place.key
        try:
            tree = HfApi(endpoint=_endpoint()).list_repo_tree(
                name,
                folder or None,
                recursive=True,
                revision=revision,
                repo_type="dataset",
            )
            paths = [entry.path for entry in tree if isinstance(entry, RepoFile)]
        except Exception as error:  # the library and its network layer have many kinds
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise NoAnswer(errno.EIO, f"the hub: {lines[0][:200]}") from None
        return [path.removeprefix(f"{folder}/") for path in paths]

    @property
    def _client(self) -> Any:
        if self._opened is None:
            from huggingface_hub import get_token

            name, revision = self._name_and_revision()
            url = f"{_endpoint()}/datasets/{name}/resolve/{revision}/{self.place.key}"
            token = get_token()
            headers = {}
            if token:
                headers["Authorization"] = f"Bearer {token}"
            self._opened = _http(url, headers)
        return self._opened

    def _name_and_revision(self) -> tuple[str, str]:
        """Return OWNER/NAME and the revision, "main" by default."""
        name, _, revision = self.place.bucket.removeprefix("datasets/").partition("@")
        return name, revision or "main"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _http(url: str, headers: dict[str, str] | None = None) -> HTTPStore:
    options: Any = {
        "allow_http": url.startswith("http://"),
        "default_headers": headers or {},
    }
    return HTTPStore.from_url(url, client_options=options, retry_config=_NO_RETRY)

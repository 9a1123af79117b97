"""Visual towers of open_clip: `open_clip:ViT-B-32/laion2b_s34b_b79k`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Source, drawn
from vitsee_core.models.sources.errors import missing_extra, one_line
from vitsee_core.models.sources.own_transform import DEFAULT, changed, pair

PREFIX = "open_clip:"


class OpenClipSource(Source):
    """The visual tower of an architecture of open_clip, and the tag of its weights."""

    arguments_in_name = True

    @property
    def parts(self) -> tuple[str, str]:
        """The architecture, and the tag of its weights or ""."""
        architecture, _, tag = self.name.removeprefix(PREFIX).partition("/")
        return architecture, tag

    def check(self) -> None:
        """As in `Source`."""
        self._tags()

    @property
    def label(self) -> str:
        """The architecture."""
        return self.parts[0]

    def matching(self) -> dict[str, list[str]]:
        """As in `Source`."""
        pattern, _ = self.parts
        found = [name for name in library().list_models() if fnmatchcase(name, pattern)]
        if not found:
            self._tags()  # which says so
        tags = library().list_pretrained_tags_by_model
        return {f"{PREFIX}{name}": list(tags(name)) for name in found}

    def make(
        self, *, pretrained: bool, seed: int, wanted: dict[str, Any], foreign: bool = False
    ) -> nn.Module:
        """As in `Source`, by open_clip's create_model."""
        tags = self._tags()
        architecture, tag = self.parts
        if pretrained and not tag:
            raise ModelError(
                f"{self.name} names no weights: give {self.name}/TAG ({', '.join(tags) or 'none'}),"
                " --checkpoint FILE or --random-init SEED"
            )
        given = dict(wanted)
        size = given.pop("img_size", None)
        if size is not None:
            rows, cols = pair(size)
            given["force_image_size"] = rows if rows == cols else (rows, cols)

        def made() -> nn.Module:
            weights = tag if pretrained else None
            with _quiet():
                whole = library().create_model(architecture, pretrained=weights, **given)
            tower: nn.Module = whole.visual
            return tower

        try:
            return drawn(seed, made, self.name)
        except ModelError as error:
            cause = error.__cause__
            if pretrained and isinstance(cause, OSError | RuntimeError):
                raise ModelError(
                    f"the weights of {self.name} are not on this machine, and cannot be fetched: "
                    f"{one_line(cause)}; give --checkpoint FILE or --random-init SEED"
                ) from error
            raise

    def without_weights(self, wanted: dict[str, Any]) -> nn.Module:
        """As in `Source`: with random weights, as open_clip moves what it makes to a device."""
        return self.make(pretrained=False, seed=0, wanted=wanted)

    def transform(
        self, module: nn.Module, img_size: tuple[int, int] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As in `Source`: what the tower says of its images."""
        config = getattr(module, "preprocess_cfg", None) or {}
        size = config.get("size") or getattr(module, "image_size", 224)
        own = {
            **DEFAULT,
            "input_size": (3, *pair(size)),
            "interpolation": config.get("interpolation", "bicubic"),
            "crop_mode": "squash" if config.get("resize_mode") == "squash" else "center",
            "mean": tuple(config.get("mean") or DEFAULT["mean"]),
            "std": tuple(config.get("std") or DEFAULT["std"]),
        }
        return changed(own, img_size, given, self.name)

    def architecture(self, module: nn.Module) -> str:
        """open_clip's name of it."""
        return f"{PREFIX}{self.parts[0]}"

    def pretrained_record(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """As in `Source`."""
        return {"source": "pretrained", "pretrained": ".".join(self.parts)}

    def origin(self) -> dict[str, Any]:
        """As in `Source`."""
        return {"library": "open_clip", "version": library().__version__}

    def _tags(self) -> list[str]:
        """The tags of the architecture's weights.

        Raises:
            ModelError: no such architecture, or none of its tags.
        """
        architecture, tag = self.parts
        known = library().list_models()
        if architecture not in known:
            near = difflib.get_close_matches(architecture, known, n=3, cutoff=0.5)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise ModelError(
                f"no model of open_clip is called {architecture!r}{hint} "
                f"(run: vitsee models '{PREFIX}*' --names)"
            )
        tags = [str(x) for x in library().list_pretrained_tags_by_model(architecture)]
        if tag and tag not in tags:
            has = ", ".join(tags) or "none"
            raise ModelError(f"{architecture} of open_clip has no weights {tag!r}; it has: {has}")
        return tags


SOURCE = OpenClipSource


@contextmanager
def _quiet() -> Iterator[None]:
    """Without open_clip's remark that weights are random, as asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def library() -> Any:
    """open_clip.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import open_clip
    except ImportError as error:
        raise missing_extra("open_clip", "open-clip") from error
    return open_clip

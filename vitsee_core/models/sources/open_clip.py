"""Visual towers of open_clip: `open_clip:ViT-B-32/laion2b_s34b_b79k`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import drawn
from vitsee_core.models.sources.errors import missing_extra
from vitsee_core.models.sources.own_transform import DEFAULT, changed, pair
from vitsee_core.models.sources.tagged import TaggedSource


class OpenClipSource(TaggedSource):
    """The visual tower of an architecture of open_clip, and the tag of its weights."""

    library, what, all_names = "open_clip", "model", " --names"

    def known(self) -> list[str]:
        return list(library().list_models())

    def tags_of(self, model: str) -> list[str]:
        return [str(x) for x in library().list_pretrained_tags_by_model(model)]

    def make(
        self, *, pretrained: bool, seed: int, wanted: dict[str, Any], foreign: bool = False
    ) -> nn.Module:
        tags = self.tags()
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

        def made() -> Any:
            with _quiet():
                weights = tag if pretrained else None
                return library().create_model(architecture, pretrained=weights, **given).visual

        try:
            return drawn(seed, made, self.name)
        except ModelError as error:
            if pretrained and isinstance(error.__cause__, OSError | RuntimeError):
                raise self.not_fetched(error.__cause__) from error
            raise

    def without_weights(self, wanted: dict[str, Any]) -> nn.Module:
        """The model with random weights: open_clip moves what it makes to a device, so that it
        cannot be on meta."""
        return self.make(pretrained=False, seed=0, wanted=wanted)

    def transform(
        self, module: nn.Module, img_size: tuple[int, int] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The transform of `Source`, from what the tower says of its images."""
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

    def pretrained_record(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"source": "pretrained", "pretrained": ".".join(self.parts)}

    def origin(self) -> dict[str, Any]:
        return {"library": "open_clip", "version": library().__version__}


SOURCE = OpenClipSource


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without open_clip's remark that weights are random, as was asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def library() -> Any:
    """open_clip; a ModelError where it is not installed."""
    try:
        import open_clip
    except ImportError as error:
        raise missing_extra("open_clip", "open-clip") from error
    return open_clip

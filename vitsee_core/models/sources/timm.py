"""timm's models: `vit_base_patch16_224.dino`, `hf-hub:OWNER/NAME`, `local-dir:FOLDER`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vitsee_core.models.input_transform import input_transform, label_names
from vitsee_core.models.sources.base import Source
from vitsee_core.models.sources.timm_arguments import check_foreign, refuse_loading
from vitsee_core.models.sources.timm_create import (
    FOLDER,
    check_known,
    converter_of,
    create_model,
    heads_no_shape_shows,
    not_as_pretrained,
    skips_left_out,
)
from vitsee_core.models.sources.timm_names import matching


class TimmSource(Source):
    """A name that timm's create_model takes: `full`."""

    @property
    def full(self) -> str:
        """The name as timm knows it."""
        return self.name

    def check(self) -> None:
        check_known(self.full, self.name)

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        refuse_loading(args)

    def check_foreign(self, args: Mapping[str, Any], where: str) -> None:
        """Refuse what `Source` does: only timm's own models, with arguments that size a layer, take
        foreign weights, and no folder does."""
        check_foreign(self.name, args, where)

    def placed(self, folder: Path) -> str:
        if not self.name.startswith(FOLDER):
            return self.name
        return f"{FOLDER}{folder / Path(self.name.removeprefix(FOLDER)).expanduser()}"

    def matching(self) -> dict[str, list[str]]:
        """The architectures that match; a folder and a repository stand for themselves."""
        return {self.name: []} if ":" in self.name else matching(self.name)

    def stated_size(self) -> tuple[int, int] | None:
        import timm

        config: Any = timm.get_pretrained_cfg(self.name)
        return None if config is None else tuple(config.input_size[1:])

    @property
    def label(self) -> str:
        """The architecture; of a folder or repository its last part."""
        last = re.split(r"[/:]", self.name.rstrip("/"))[-1]
        return last if self.name.startswith(FOLDER) else last.partition(".")[0]

    @property
    def skips_left_out(self) -> tuple[str, ...]:
        """`ablate_skip` of a folder's config.json."""
        return skips_left_out(self.full, self.name)

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        return args

    def make(
        self, *, pretrained: bool, seed: int, wanted: dict[str, Any], foreign: bool = False
    ) -> nn.Module:
        given: dict[str, Any] = {"seed": seed, "wanted": wanted, "foreign": foreign}
        return create_model(self.full, self.name, pretrained=pretrained, **given)

    def converter(self, module: nn.Module) -> Callable[..., Any] | None:
        return converter_of(module) or super().converter(module)

    def transform(
        self, module: nn.Module, img_size: tuple[int, int] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        return input_transform(module, self.name, img_size, given)

    def architecture(self, module: nn.Module) -> str:
        return str(_config(module).get("architecture") or self.full)

    def class_names(self, module: nn.Module) -> list[str] | None:
        return label_names(_config(module), self.name)

    def pretrained_record(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """The record of `Source`; a name without a tag stands for the tag recorded here."""
        return {**_record(module, self.full), **not_as_pretrained(module, self.full, wanted)}

    def assumed(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """`num_heads` where no shape shows it."""
        heads = heads_no_shape_shows(module, self.full, wanted)
        return {} if heads is None else {"num_heads": heads}


SOURCE = TimmSource


def _config(module: nn.Module) -> dict[str, Any]:
    return getattr(module, "pretrained_cfg", None) or {}


def _record(module: nn.Module, full: str) -> dict[str, Any]:
    if full.startswith(FOLDER):
        return {"source": "local-dir"}
    config = _config(module)
    named = [str(config[key]) for key in ("architecture", "tag") if config.get(key)]
    # timm's configuration repeats its advice on the variants that follow it.
    advice = [str(note) for note in config.get("notes") or ()]
    if not any(isinstance(child, nn.GELU) for child in module.modules()):
        advice = [note for note in advice if "QuickGELU" not in note]
    record = {"source": "pretrained", "pretrained": ".".join(named) or full}
    return {**record, **({"notes": advice} if advice else {})}

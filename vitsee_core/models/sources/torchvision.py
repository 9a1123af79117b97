"""torchvision's classifiers: `torchvision:vit_b_16`, `torchvision:vit_b_16/IMAGENET1K_V1`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Source, drawn
from vitsee_core.models.sources.errors import one_line
from vitsee_core.models.sources.own_transform import changed, stated

PREFIX = "torchvision:"


class TorchvisionSource(Source):
    """A builder of torchvision.models, and one of its weights: `DEFAULT` where none is named."""

    arguments_in_name = True

    @property
    def parts(self) -> tuple[str, str]:
        """The builder's name and that of its weights, "" for the default ones."""
        builder, _, weights = self.name.removeprefix(PREFIX).partition("/")
        return builder, weights

    def check(self) -> None:
        """As in `Source`."""
        self._weights()

    def matching(self) -> dict[str, list[str]]:
        """As in `Source`."""
        found = names(self.parts[0])
        if not found:
            self._weights()  # which says so
        return {f"{PREFIX}{name}": tags for name, tags in found.items()}

    @property
    def label(self) -> str:
        """The builder's name."""
        return self.parts[0]

    def make(
        self, *, pretrained: bool, seed: int, wanted: dict[str, Any], foreign: bool = False
    ) -> nn.Module:
        """As in `Source`, by `torchvision.models.get_model`."""
        weights = self._weights()
        if weights is None and pretrained:
            raise ModelError(f"{self.name} has no weights; give --checkpoint or --random-init SEED")
        if pretrained:
            self._check_weights(weights)
        size, given = wanted.get("img_size"), {k: x for k, x in wanted.items() if k != "img_size"}
        for sized in _sizes(size):
            try:
                return drawn(
                    seed, partial(self._build, weights, pretrained, sized | given), self.name
                )
            except ModelError as error:
                if not any(f"argument '{key}'" in str(error) for key in sized):
                    raise
        raise ModelError(f"{self.name} takes square images alone; --img-size is {size}")

    def transform(
        self, module: nn.Module, img_size: tuple[int, int] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As in `Source`: that of the weights, also where they are not taken."""
        weights = self._weights()
        own = stated(None if weights is None else weights.transforms(), module, self.name)
        side = getattr(module, "image_size", None)
        if img_size is None and isinstance(side, int):
            img_size = side, side
        return changed(own, img_size, given, self.name)

    def architecture(self, module: nn.Module) -> str:
        """The builder's name, with the prefix."""
        return f"{PREFIX}{self.parts[0]}"

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Those of the weights."""
        weights = self._weights()
        return None if weights is None else list(weights.meta["categories"])

    def pretrained_record(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """As in `Source`."""
        return {"source": "pretrained", "pretrained": f"{self.parts[0]}.{self._weights().name}"}

    def origin(self) -> dict[str, Any]:
        """As in `Source`."""
        import torchvision

        return {"library": "torchvision", "version": torchvision.__version__}

    def _weights(self) -> Any:
        """The member of the builder's enumeration of weights; None where it has none.

        Raises:
            ModelError: no such builder of a classifier, or none of its weights.
        """
        from torchvision import models

        builder, wanted = self.parts
        known = names()
        if builder not in known:
            near = difflib.get_close_matches(builder, known, n=3, cutoff=0.5)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise ModelError(
                f"no classifier of torchvision is called {builder!r}{hint} "
                f"(run: vitsee models '{PREFIX}*')"
            )
        found: Any = models.get_model_weights(builder)
        if wanted and wanted not in found.__members__:
            tags = ", ".join(found.__members__) or "none"
            raise ModelError(f"{builder} of torchvision has no weights {wanted!r}; it has: {tags}")
        return found[wanted] if wanted else getattr(found, "DEFAULT", None)

    def _build(self, weights: Any, pretrained: bool, given: dict[str, Any]) -> nn.Module:
        from torchvision import models

        module: nn.Module = models.get_model(
            self.parts[0], weights=weights if pretrained else None, **given
        )
        return module

    def _check_weights(self, weights: Any) -> None:
        """Fetch the file of weights if it is not in torch.hub's folder.

        Raises:
            ModelError: it cannot be had.
        """
        try:
            weights.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"the weights of {self.name} are not on this machine, and cannot be fetched: "
                f"{one_line(error)}; give --checkpoint FILE or --random-init SEED"
            ) from error


SOURCE = TorchvisionSource


def _sizes(size: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """The ways in which builders take an image size, the last one for those that take any."""
    if size is not None:
        if size[0] == size[1]:
            yield {"image_size": size[0]}
        yield {"input_size": size}
    yield {}


def names(pattern: str = "*") -> dict[str, list[str]]:
    """Builders of classifiers that match a glob -> the names of their weights."""
    from torchvision import models

    found = models.list_models(module=models)
    return {
        name: list(models.get_model_weights(name).__members__)
        for name in found
        if fnmatchcase(name, pattern)
    }

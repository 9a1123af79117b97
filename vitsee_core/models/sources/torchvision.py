"""torchvision's classifiers: `torchvision:vit_b_16`, `torchvision:vit_b_16/IMAGENET1K_V1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import drawn
from vitsee_core.models.sources.own_transform import changed, stated
from vitsee_core.models.sources.tagged import TaggedSource


class TorchvisionSource(TaggedSource):
    """A builder of torchvision.models, and one of its weights: `DEFAULT` where none is named."""

    library, what = "torchvision", "classifier"

    def known(self) -> list[str]:
        from torchvision import models

        return list(models.list_models(module=models))

    def tags_of(self, model: str) -> list[str]:
        from torchvision import models

        return list(models.get_model_weights(model).__members__)

    def make(
        self, *, pretrained: bool, seed: int, wanted: dict[str, Any], foreign: bool = False
    ) -> nn.Module:
        from torchvision import models

        weights = self._weights()
        if weights is None and pretrained:
            raise ModelError(f"{self.name} has no weights; give --checkpoint or --random-init SEED")
        if pretrained:
            self._fetch(weights)
        size, given = wanted.get("img_size"), {k: x for k, x in wanted.items() if k != "img_size"}
        own = weights if pretrained else None

        def build(sized: dict[str, Any]) -> nn.Module:
            return models.get_model(self.parts[0], weights=own, **sized, **given)

        for sized in _sizes(size):
            try:
                return drawn(seed, partial(build, sized), self.name)
            except ModelError as error:
                if not any(f"argument '{key}'" in str(error) for key in sized):
                    raise
        raise ModelError(f"{self.name} takes square images alone; --img-size is {size}")

    def transform(
        self, module: nn.Module, img_size: tuple[int, int] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The transform of `Source`: that of the weights, also where they are not taken."""
        weights = self._weights()
        own = stated(None if weights is None else weights.transforms(), module, self.name)
        side = getattr(module, "image_size", None)
        if img_size is None and isinstance(side, int):
            img_size = side, side
        return changed(own, img_size, given, self.name)

    def class_names(self, module: nn.Module) -> list[str] | None:
        weights = self._weights()
        return None if weights is None else list(weights.meta["categories"])

    def pretrained_record(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"source": "pretrained", "pretrained": f"{self.parts[0]}.{self._weights().name}"}

    def origin(self) -> dict[str, Any]:
        import torchvision

        return {"library": "torchvision", "version": torchvision.__version__}

    def _weights(self) -> Any:
        """The member of the builder's enumeration of weights; None where it has none. Errors as
        `tags`."""
        from torchvision import models

        self.tags()
        builder, tag = self.parts
        found: Any = models.get_model_weights(builder)
        return found[tag] if tag else getattr(found, "DEFAULT", None)

    def _fetch(self, weights: Any) -> None:
        """Fetch the file of weights if it is not in torch.hub's folder."""
        try:
            weights.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise self.not_fetched(error) from error


SOURCE = TorchvisionSource


def _sizes(size: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """The ways in which builders take an image size, the last one for those that take any."""
    if size is not None:
        if size[0] == size[1]:
            yield {"image_size": size[0]}
        yield {"input_size": size}
    yield {}

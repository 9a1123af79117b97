"""Models that a library knows by a name, and their weights by a tag, `LIBRARY:NAME/TAG`: the visual
towers of open_clip, `open_clip:ViT-B-32/laion2b_s34b_b79k`, and torchvision's classifiers,
`torchvision:vit_b_16/IMAGENET1K_V1`.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import (
    Source,
    make_seeded,
    missing_extra,
    near_names,
    one_line,
    quiet,
)
from vitsee_core.models.sources.open_clip_weights import by_the_rule, refuse_loading
from vitsee_core.models.sources.transforms import DEFAULT, author_transform, changed, pair
from vitsee_core.models.weights.fitting import Fit
from vitsee_core.models.weights.positions import Resampling
from vitsee_core.models.weights.watching import watched_loads

QUICK = "-quickgelu"  # of open_clip's architectures that compute QuickGELU


class TaggedSource(Source):
    """A model that a library knows by a name, with weights that it knows by a tag.

    Attributes:
        library: name of the library, which stands before the colon.
        kind: noun for its models in messages.
        all_names: option of `vitsee models`, with a blank before it, that lists as many models as
            the library has; "" if it needs none.
    """

    arguments_in_name = True
    library: str
    kind: str
    all_names = ""

    @abstractmethod
    def model_names(self) -> list[str]:
        """Return the names of the library's models."""

    @abstractmethod
    def tags_of(self, model: str) -> list[str]:
        """Return the tags of a model's weights."""

    @property
    def parts(self) -> tuple[str, str]:
        """The model's name, and the tag of its weights or ""."""
        model, _, tag = self.name.removeprefix(f"{self.library}:").partition("/")
        return model, tag

    def check(self) -> None:
        """Raise ModelError for an unknown model or tag."""
        self.tags()

    @property
    def label(self) -> str:
        """The model's name without library and tag."""
        return self.parts[0]

    def matching(self) -> dict[str, list[str]]:
        """Return the models whose names match the pattern, with all their tags."""
        pattern = self.parts[0]
        names = [name for name in self.model_names() if fnmatchcase(name, pattern)]
        if not names:
            self.tags()  # raises the error for an unknown name
        return {f"{self.library}:{name}": self.tags_of(name) for name in names}

    def architecture(self, module: nn.Module) -> str:
        """Return library and model, without the tag."""
        return f"{self.library}:{self.parts[0]}"

    def tags(self) -> list[str]:
        """Return the tags of the model's weights.

        Raises:
            ModelError: the library does not have the model, or the model not the tag of the name.
        """
        model, tag = self.parts
        names = self.model_names()
        if model not in names:
            near = near_names(model, names)
            raise ModelError(
                f"no {self.kind} of {self.library} is called {model!r}{near} "
                f"(run: vitsee models '{self.library}:*'{self.all_names})"
            )
        tags = self.tags_of(model)
        if tag and tag not in tags:
            has = ", ".join(tags) or "none"
            raise ModelError(
                f"{model} of {self.library} has no weights {tag!r}; it has: {has}"
            )
        return tags

    def not_fetched(self, error: BaseException) -> ModelError:
        """Return the error for weights that are not on this machine and cannot be fetched."""
        return ModelError(
            f"the weights of {self.name} are not on this machine, and cannot be fetched: "
            f"{one_line(error)}; give --checkpoint FILE or --random-init SEED"
        )


class OpenClipSource(TaggedSource):
    """The visual tower of an architecture of open_clip, and the tag of its weights.

    Attributes:
        fit: how the tag's weights were fitted; None before, and for random ones.
    """

    library = "open_clip"
    kind = "model"
    all_names = " --names"
    fit: Fit | None = None

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        """Raise ModelError if an argument chooses what to load."""
        refuse_loading(args)

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return open_clip's word for QuickGELU, which OpenAI's files ask for in timm's."""
        return {"quick_gelu": True} if args.get("act_layer") == "quick_gelu" else {}

    def model_names(self) -> list[str]:
        """Return the architectures that open_clip lists."""
        return list(library().list_models())

    def tags_of(self, model: str) -> list[str]:
        """Return the tags that open_clip lists for an architecture."""
        return [str(tag) for tag in library().list_pretrained_tags_by_model(model)]

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the visual tower like `Source.make`, and set `fit`."""
        tags = self.tags()
        architecture, tag = self.parts
        if pretrained and not tag:
            raise ModelError(
                f"{self.name} names no weights: give {self.name}/TAG "
                f"({', '.join(tags) or 'none'}), --checkpoint FILE or --random-init SEED"
            )
        keywords = dict(arguments)
        size = keywords.pop("img_size", None)
        if size is not None:
            rows, cols = pair(size)
            keywords["force_image_size"] = rows if rows == cols else (rows, cols)

        def build() -> Any:
            """Return the visual tower of open_clip's model."""
            with quiet(), warnings.catch_warnings():
                # open_clip does not see `quick_gelu` among the arguments; `_require_activation`
                # does.
                warnings.filterwarnings("ignore", message="QuickGELU mismatch")
                model = library().create_model(
                    architecture, pretrained=tag if pretrained else None, **keywords
                )
                return model.visual

        config = library().get_model_config(architecture) or {}
        if pretrained:
            self._require_activation({**config, **keywords})
        # A tag's weights are for images of the architecture's size, whatever the user's is.
        side = config.get("vision_cfg", {}).get("image_size")
        resampling = dataclasses.replace(
            self.resampling or Resampling(),
            stated_size=None if side is None else pair(side),
        )
        try:
            with (
                watched_loads(self.name) as loads,
                by_the_rule(self.name, resampling) as fits,
            ):
                module = make_seeded(seed, build, self.name)
            loads.require_all(module, self.name)
            self.fit = fits[-1] if fits else None
            return module
        except ModelError as error:
            if pretrained and isinstance(error.__cause__, OSError | RuntimeError):
                raise self.not_fetched(error.__cause__) from error
            raise

    def _require_activation(self, config: Mapping[str, Any]) -> None:
        """Refuse a tag whose weights were trained with another activation than the model computes;
        open_clip itself only warns.

        config: the architecture's configuration with the user's arguments.

        Raises:
            ModelError: names the architecture that computes it.
        """
        architecture, tag = self.parts
        pretrained_config = library().get_pretrained_cfg(architecture, tag)
        trained_quick = bool(pretrained_config.get("quick_gelu", False))
        is_quick = bool(config.get("quick_gelu") or config.get("force_quick_gelu"))
        if trained_quick == is_quick:
            return
        sibling = architecture.removesuffix(QUICK)
        if trained_quick:
            sibling = f"{architecture}{QUICK}"
        expected = f"{self.name}?quick_gelu={str(trained_quick).lower()}"
        if sibling != architecture and sibling in self.model_names():
            expected = f"{self.library}:{sibling}/{tag}"
        names = {True: "QuickGELU", False: "GELU"}
        raise ModelError(
            f"{self.name}: these weights were trained with {names[trained_quick]}, the "
            f"model computes {names[is_quick]}; expected {expected}"
        )

    def without_weights(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model with random weights on the CPU: open_clip moves it to a device, which
        the meta device does not allow."""
        return self.make(pretrained=False, seed=0, arguments=arguments)

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the transform of the tower's `preprocess_cfg`, with the user's settings."""
        config = getattr(module, "preprocess_cfg", None) or {}
        size = config.get("size") or getattr(module, "image_size", 224)
        transform = {
            **DEFAULT,
            "input_size": (3, *pair(size)),
            "interpolation": config.get("interpolation", "bicubic"),
            "crop_mode": "squash" if config.get("resize_mode") == "squash" else "center",
            "mean": tuple(config.get("mean") or DEFAULT["mean"]),
            "std": tuple(config.get("std") or DEFAULT["std"]),
        }
        return changed(transform, img_size, settings, self.name)

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return ARCHITECTURE.TAG, and how the weights were fitted."""
        record = {"source": "pretrained", "pretrained": ".".join(self.parts)}
        if self.fit is None:
            return record
        return {**record, **self.fit.record()}

    def origin(self) -> dict[str, Any]:
        """Return the library and its version."""
        return {"library": "open_clip", "version": library().__version__}


def library() -> Any:
    """Return the module open_clip.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import open_clip
    except ImportError as error:
        raise missing_extra("open_clip", "open-clip") from error
    return open_clip


class TorchvisionSource(TaggedSource):
    """A builder of torchvision.models, and one of its weights: `DEFAULT` where none is named."""

    library = "torchvision"
    kind = "classifier"

    def model_names(self) -> list[str]:
        """Return torchvision's classifiers, without those of its submodules."""
        from torchvision import models

        return list(models.list_models(module=models))

    def tags_of(self, model: str) -> list[str]:
        """Return the members of the builder's enumeration of weights."""
        from torchvision import models

        return list(models.get_model_weights(model).__members__)

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the model like `Source.make`; weights are fetched into torch.hub's folder."""
        from torchvision import models

        weights = self._weights()
        if weights is None and pretrained:
            raise ModelError(
                f"{self.name} has no weights; give --checkpoint or --random-init SEED"
            )
        if pretrained:
            # Fetched before the builder runs: an error here is one of the network.
            try:
                weights.get_state_dict(progress=False, check_hash=True)
            except (OSError, RuntimeError) as error:
                raise self.not_fetched(error) from error
        keywords = dict(arguments)
        size = keywords.pop("img_size", None)

        def build(size_keywords: dict[str, Any]) -> nn.Module:
            """Call torchvision's builder with the size under one of its names."""
            return models.get_model(
                self.parts[0],
                weights=weights if pretrained else None,
                **size_keywords,
                **keywords,
            )

        for size_keywords in _size_keywords(size):
            try:
                with watched_loads(self.name) as loads:
                    module = make_seeded(seed, partial(build, size_keywords), self.name)
                loads.require_all(module, self.name)
                return module
            except ModelError as error:
                # Only an unknown name of the size leads to the next one.
                if not any(f"argument '{key}'" in str(error) for key in size_keywords):
                    raise
        raise ModelError(f"{self.name} takes square images alone; --img-size is {size}")

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the transform of the weights, also of a model with random ones, with the user's
        settings."""
        weights = self._weights()
        preset = None if weights is None else weights.transforms()
        transform = author_transform(preset, module, self.name)
        side = getattr(module, "image_size", None)
        if img_size is None and isinstance(side, int):
            img_size = side, side
        return changed(transform, img_size, settings, self.name)

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Return the categories of the weights, also of a model with random ones."""
        weights = self._weights()
        if weights is None:
            return None
        return list(weights.meta["categories"])

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return BUILDER.TAG."""
        return {
            "source": "pretrained",
            "pretrained": f"{self.parts[0]}.{self._weights().name}",
        }

    def origin(self) -> dict[str, Any]:
        """Return the library and its version."""
        import torchvision

        return {"library": "torchvision", "version": torchvision.__version__}

    def _weights(self) -> Any:
        """Return the member of the builder's enumeration of weights, None where that is empty.

        Raises:
            ModelError: no such builder or tag.
        """
        from torchvision import models

        self.tags()
        builder, tag = self.parts
        enumeration: Any = models.get_model_weights(builder)
        return enumeration[tag] if tag else getattr(enumeration, "DEFAULT", None)


def _size_keywords(size: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """Yield the keywords for an image size that builders may have; {} for those that take any."""
    if size is not None:
        if size[0] == size[1]:
            yield {"image_size": size[0]}
        yield {"input_size": size}
    yield {}

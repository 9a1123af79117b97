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
    drawn,
    missing_extra,
    near_names,
    one_line,
    quiet,
)
from vitsee_core.models.sources.open_clip_weights import by_the_rule, refuse_loading
from vitsee_core.models.sources.transforms import DEFAULT, changed, pair, stated
from vitsee_core.models.weights.fitting import Fit
from vitsee_core.models.weights.positions import Resampling
from vitsee_core.models.weights.watching import watched_loads

QUICK = "-quickgelu"  # of open_clip's architectures that compute QuickGELU


class TaggedSource(Source):
    """library: what stands before the colon. what: the kind of its models, in messages. all_names:
    the option of `vitsee models` that lists as many as it has, if it needs one."""

    arguments_in_name = True
    library: str
    what: str
    all_names = ""

    @abstractmethod
    def known(self) -> list[str]:
        """The names of its models."""

    @abstractmethod
    def tags_of(self, model: str) -> list[str]:
        """The tags of one's weights."""

    @property
    def parts(self) -> tuple[str, str]:
        """The model's name, and the tag of its weights or ""."""
        model, _, tag = self.name.removeprefix(f"{self.library}:").partition("/")
        return model, tag

    def check(self) -> None:
        self.tags()

    @property
    def label(self) -> str:
        return self.parts[0]

    def matching(self) -> dict[str, list[str]]:
        found = [name for name in self.known() if fnmatchcase(name, self.parts[0])]
        if not found:
            self.tags()  # which says so
        return {f"{self.library}:{name}": self.tags_of(name) for name in found}

    def architecture(self, module: nn.Module) -> str:
        return f"{self.library}:{self.parts[0]}"

    def tags(self) -> list[str]:
        """The tags of the model's weights; a ModelError for no such model, or none of its tags."""
        model, tag = self.parts
        known = self.known()
        if model not in known:
            raise ModelError(
                f"no {self.what} of {self.library} is called {model!r}{near_names(model, known)} "
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
        """The line for weights that are neither here nor to be had."""
        return ModelError(
            f"the weights of {self.name} are not on this machine, and cannot be fetched: "
            f"{one_line(error)}; give --checkpoint FILE or --random-init SEED"
        )


class OpenClipSource(TaggedSource):
    """The visual tower of an architecture of open_clip, and the tag of its weights.

    fit: how the tag's weights were fitted; None before, and for random ones.
    """

    library = "open_clip"
    what = "model"
    all_names = " --names"
    fit: Fit | None = None

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        refuse_loading(args)

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whether OpenAI's files ask for QuickGELU, in open_clip's word."""
        return {"quick_gelu": True} if args.get("act_layer") == "quick_gelu" else {}

    def known(self) -> list[str]:
        return list(library().list_models())

    def tags_of(self, model: str) -> list[str]:
        return [str(x) for x in library().list_pretrained_tags_by_model(model)]

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
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
            with quiet(), warnings.catch_warnings():
                # It does not know of `quick_gelu` among the arguments; asked above.
                warnings.filterwarnings("ignore", message="QuickGELU mismatch")
                weights = tag if pretrained else None
                return (
                    library()
                    .create_model(architecture, pretrained=weights, **given)
                    .visual
                )

        config = library().get_model_config(architecture) or {}
        if pretrained:
            self._require_activation({**config, **given})
        # A tag's weights are for the architecture's own images, whatever size is asked for.
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
                module = drawn(seed, made, self.name)
            loads.require_all(module, self.name)
            self.fit = fits[-1] if fits else None
            return module
        except ModelError as error:
            if pretrained and isinstance(error.__cause__, OSError | RuntimeError):
                raise self.not_fetched(error.__cause__) from error
            raise

    def _require_activation(self, config: Mapping[str, Any]) -> None:
        """Refuse a tag whose weights were trained with another activation than the model computes:
        open_clip itself warns alone.

        config: the architecture's configuration with the user's arguments.

        Raises:
            ModelError: names the architecture that has it.
        """
        architecture, tag = self.parts
        trained = bool(
            library().get_pretrained_cfg(architecture, tag).get("quick_gelu", False)
        )
        computed = bool(config.get("quick_gelu") or config.get("force_quick_gelu"))
        if trained == computed:
            return
        other = f"{architecture}{QUICK}" if trained else architecture.removesuffix(QUICK)
        expected = f"{self.name}?quick_gelu={str(trained).lower()}"
        if other != architecture and other in self.known():
            expected = f"{self.library}:{other}/{tag}"
        names = {True: "QuickGELU", False: "GELU"}
        raise ModelError(
            f"{self.name}: these weights were trained with {names[trained]}, the model computes "
            f"{names[computed]}; expected {expected}"
        )

    def without_weights(self, wanted: dict[str, Any]) -> nn.Module:
        """The model with random weights: open_clip moves what it makes to a device, so that it
        cannot be on meta."""
        return self.make(pretrained=False, seed=0, wanted=wanted)

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
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

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        record = {"source": "pretrained", "pretrained": ".".join(self.parts)}
        return {**record, **({} if self.fit is None else self.fit.record())}

    def origin(self) -> dict[str, Any]:
        return {"library": "open_clip", "version": library().__version__}


def library() -> Any:
    """open_clip; a ModelError where it is not installed."""
    try:
        import open_clip
    except ImportError as error:
        raise missing_extra("open_clip", "open-clip") from error
    return open_clip


class TorchvisionSource(TaggedSource):
    """A builder of torchvision.models, and one of its weights: `DEFAULT` where none is named."""

    library = "torchvision"
    what = "classifier"

    def known(self) -> list[str]:
        from torchvision import models

        return list(models.list_models(module=models))

    def tags_of(self, model: str) -> list[str]:
        from torchvision import models

        return list(models.get_model_weights(model).__members__)

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        from torchvision import models

        weights = self._weights()
        if weights is None and pretrained:
            raise ModelError(
                f"{self.name} has no weights; give --checkpoint or --random-init SEED"
            )
        if pretrained:
            try:  # into torch.hub's folder
                weights.get_state_dict(progress=False, check_hash=True)
            except (OSError, RuntimeError) as error:
                raise self.not_fetched(error) from error
        size = wanted.get("img_size")
        given = {k: x for k, x in wanted.items() if k != "img_size"}
        own = weights if pretrained else None

        def build(sized: dict[str, Any]) -> nn.Module:
            return models.get_model(self.parts[0], weights=own, **sized, **given)

        for sized in _ways_of_size(size):
            try:
                with watched_loads(self.name) as loads:
                    module = drawn(seed, partial(build, sized), self.name)
                loads.require_all(module, self.name)
                return module
            except ModelError as error:
                if not any(f"argument '{key}'" in str(error) for key in sized):
                    raise
        raise ModelError(f"{self.name} takes square images alone; --img-size is {size}")

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
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
        if weights is None:
            return None
        return list(weights.meta["categories"])

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "source": "pretrained",
            "pretrained": f"{self.parts[0]}.{self._weights().name}",
        }

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


def _ways_of_size(size: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """The ways in which builders take an image size, the last one for those that take any."""
    if size is not None:
        if size[0] == size[1]:
            yield {"image_size": size[0]}
        yield {"input_size": size}
    yield {}

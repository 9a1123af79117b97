"""Vision models of transformers: `transformers:facebook/dinov2-small[@REVISION]`, a folder, one
tower of a larger model by its path behind `#`, or a class with its default configuration,
`transformers:ViTModel?num_hidden_layers=4`.

Code of a repository runs with `trust_remote_code` alone: models that need it are refused without.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import (
    OWN_TRANSFORM,
    Choices,
    Source,
    drawn,
    one_line,
)
from vitsee_core.models.sources.processors import (
    ROUNDED,
    THUMBNAIL,
    Processor,
    native_canvas,
    processor_config,
)
from vitsee_core.models.sources.timm_create import why_unreachable
from vitsee_core.models.sources.transformers_classes import (
    FRAMES,
    backend,
    by_attention,
    check_input,
    class_names,
    clip_frames,
    language_input_of,
    library,
    named_towers,
    on_meta,
    random_language_input,
    random_model,
    read_parts,
    read_weights,
    remote_class,
    size_of,
    towers,
    with_features,
)
from vitsee_core.models.sources.transformers_inputs import (
    adapt,
    as_patches,
    refuse_others,
)
from vitsee_core.models.sources.transformers_weights import load_whole, renamed_by_library
from vitsee_core.models.sources.transforms import DEFAULT, changed, pair
from vitsee_core.models.tokens.clips import accept_clips
from vitsee_core.models.tokens.towers import (
    FEATURES,
    PART,
    Packing,
    image_config,
    is_language_input,
    packed_inputs,
    packing_of,
)
from vitsee_core.models.weights.positions import require_same_grid
from vitsee_stores.plan import Canvas

PREFIX = "transformers:"
_CLASSIFIES = ("ForImageClassification", "ForVideoClassification")
_PACKED_SIDE = 448
ASSUMED = (
    "has no image processor: assumed are ImageNet's mean and standard deviation (for others: "
    "--img-mean, --img-std)"
)
ONE_SIZE = (
    "gets all images at one size (--img-size, --crop-mode), where its own processor keeps each "
    "one's proportions"
)


@dataclass(frozen=True)
class _Tower:
    """A part that is a model of its own, with its path in the whole."""

    kind: Any
    config: Any
    path: str


class TransformersSource(Source):
    """A checkpoint of the hub or of a folder, or a class."""

    arguments_in_name = True
    has_processors = True
    takes_frames = True
    _other_frames: tuple[int, int] | None = (
        None  # of the configuration, and those asked for
    )

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        super().__init__(name, choices)
        self.loaded: dict[
            str, Any
        ] = {}  # what was missing or left over in its own weights
        self.rounds = False  # whether its processor's floats are rounded to 8 bits
        self.packs = False  # whether it is given packed patches
        self.assumes = (
            False  # whether mean or deviation are neither its own nor the user's
        )

    @property
    def parts(self) -> tuple[str, str | None, str]:
        """Repository, folder or class; the revision; the path of a part."""
        place, _, part = self.name.removeprefix(PREFIX).partition("#")
        folder = Path(place or "-").expanduser()  # no name is no folder
        if "@" in place and not folder.exists():
            place, _, revision = place.partition("@")
            return place, revision or None, part
        return (str(folder) if folder.exists() else place), None, part

    def check(self) -> None:
        place, revision, _ = self.parts
        if not place:
            raise ModelError(
                f"{self.name!r} names no model; expected transformers:OWNER/NAME, a folder, or a "
                "class as transformers:ViTModel"
            )
        if self.name.endswith("#"):
            raise ModelError(
                f"{self.name!r} names no part behind #; leave it out, or name a part, as "
                "#vision_model or #language-in"
            )
        if revision is not None and (self._is_class or place.startswith(("/", ".", "~"))):
            raise ModelError(
                f"{self.name!r} names the revision {revision!r} of a "
                f"{'class' if self._is_class else 'folder'}; expected it of OWNER/NAME alone"
            )

    def placed(self, folder: Path) -> str:
        place, _, part = self.parts
        own = folder / Path(place).expanduser()
        return f"{PREFIX}{own}{'#' if part else ''}{part}" if own.is_dir() else self.name

    @property
    def label(self) -> str:
        place, _, _ = self.parts
        return (Path(place).resolve() if Path(place).is_dir() else Path(place)).name

    def matching(self) -> dict[str, list[str]]:
        place, _, _ = self.parts
        if not re.search(r"[*?[]", place):
            return {self.name: []}
        names = class_names()
        found = [name for name in names if fnmatchcase(name, place)]
        found = found or [
            name for name in names if fnmatchcase(name.lower(), place.lower())
        ]
        if not found:
            raise ModelError(
                f"no class of transformers for images matches {place!r} (try '*ViT*')"
            )
        return {f"{PREFIX}{name}": [] for own in found for name in named_towers(own)}

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the model like `Source.make`, with attention by scaled_dot_product_attention where
        the class can."""
        self.check()
        if pretrained and self._is_class:
            raise ModelError(
                f"{self.name} is a class without weights; give --random-init SEED or --checkpoint"
            )
        config = self._configured(wanted)
        kind = self._class(config)
        tower = None
        language = self.parts[2] == PART
        if language:
            kind = language_input_of(kind, self.name)
        elif self.parts[2]:
            tower = self._tower(kind, config, wanted)
        else:
            whole = self._is_class or type(config) is type(self._config)
            if packed_inputs(kind) and not whole:
                self._refuse_whole(kind)
            who = f"{self.name} ({kind.__name__})"
            check_input(kind, who, remote=self.choices.trust_remote_code)
        if pretrained:
            module = drawn(
                seed, lambda: self._pretrained(kind, config, tower, wanted), self.name
            )
        elif language:
            module = drawn(seed, lambda: random_language_input(kind, config), self.name)
        elif tower is not None:
            module = drawn(
                seed, lambda: random_model(tower.kind, tower.config), self.name
            )
        else:
            module = drawn(
                seed, lambda: self._part(random_model(kind, config)), self.name
            )
        size = wanted.get("img_size")
        own = size_of(image_config(module) or config)
        who = f"{self.name} ({type(module).__name__})"
        refuse_others(module, who)
        taken = self._processed_size or own if size is None else pair(size)
        adapt(module, taken != own, who, taken or DEFAULT["input_size"][1:])
        if (frames := clip_frames(module)) is not None:
            accept_clips(module, frames)
        return module

    def converter(self, module: nn.Module) -> Callable[..., Any] | None:
        """The library's own conversion of its older names; None for a part that is not a model of
        the library by itself."""
        is_model = isinstance(module, library().PreTrainedModel)
        if not is_model or is_language_input(module):
            return super().converter(module)
        return renamed_by_library

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        config = image_config(module)
        packing = packing_of(module)
        if self.choices.native:
            return changed(self._at_native(module, packing), None, given, self.name)
        self.packs = packing is not None
        stated = (
            self._stated() if packing is None else self._packed(packing, config, img_size)
        )
        self.rounds = stated.get("processor") == "torchvision-float"
        unsaid = any(given.get(key) is None for key in ("mean", "std"))
        self.assumes = self._processor is None and unsaid
        channels = getattr(config, "num_channels", 3)
        if packing is None:
            size = self._processed_size or size_of(config) or stated["input_size"][1:]
            stated["input_size"] = (channels if isinstance(channels, int) else 3, *size)
        return changed(stated, img_size, given, self.name)

    def architecture(self, module: nn.Module) -> str:
        part = f"#{PART}" if is_language_input(module) else ""
        return f"{PREFIX}{type(module).__name__}{part}"

    def class_names(self, module: nn.Module) -> list[str] | None:
        """The class names of the model's configuration, where they are no placeholders."""
        labels = getattr(getattr(module, "config", None), "id2label", None) or {}
        names = [str(labels[key]) for key in sorted(labels)]
        placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
        classifies = type(module).__name__.endswith(_CLASSIFIES)
        return names if classifies and not placeholders else None

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        place, revision, _ = self.parts
        name = f"{place}@{revision}" if revision else place
        folder = {"folder": Path(place).resolve().name} if Path(place).is_dir() else {}
        return {"source": "pretrained", "pretrained": name, **folder, **self.loaded}

    def origin(self) -> dict[str, Any]:
        found = {"library": "transformers", "version": library().__version__}
        if self.choices.trust_remote_code:
            found["trust_remote_code"] = True
        if self._processor is None:
            return {**found, **({"notes": [ASSUMED]} if self.assumes else {})}
        said = {
            ROUNDED: self.rounds,
            ONE_SIZE: self.packs,
            THUMBNAIL: self._processor.cuts,
        }
        notes = [note for note, holds in said.items() if holds]
        notes_found = {"notes": notes} if notes else {}
        return {**found, **self._processor.origin(), **notes_found}

    @cached_property
    def _is_class(self) -> bool:
        place, _, _ = self.parts
        plain = "/" not in place and not Path(place).is_dir() and place[:1].isupper()
        return plain and hasattr(library(), place)

    @cached_property
    def _config(self) -> Any:
        """The configuration that the model itself has."""
        place, revision, _ = self.parts
        if self._is_class:
            kind: Any = getattr(library(), place)
            if not (
                inspect.isclass(kind) and issubclass(kind, library().PreTrainedModel)
            ):
                raise ModelError(f"{place} of transformers is no model class")
            return kind.config_class()  # type: ignore[attr-defined]
        if not Path(place).is_dir() and place.count("/") > 1:
            raise ModelError(
                f"{self.name}: no folder {place}; expected one, or OWNER/NAME"
            )
        if Path(place).is_dir() and not Path(place, "config.json").is_file():
            raise ModelError(
                f"{self.name}: {place} has no config.json; expected a folder that transformers "
                "saved, with config.json and weights"
            )
        try:
            return library().AutoConfig.from_pretrained(
                place, revision=revision, **self._access
            )
        except Exception as error:
            raise self._explained(error) from error

    @cached_property
    def _access(self) -> dict[str, bool]:
        """The arguments that every load of a repository or folder is given."""
        return {"trust_remote_code": self.choices.trust_remote_code, **self._offline}

    @cached_property
    def _offline(self) -> dict[str, bool]:
        """The argument that keeps transformers from waiting for a hub that does not answer."""
        local = Path(self.parts[0]).is_dir()
        if local or why_unreachable():
            return {"local_files_only": True}
        return {}

    @cached_property
    def _processor(self) -> Processor | None:
        """The model's image processor, None where it has none; a ModelError without the chosen
        backend."""
        place, revision, _ = self.parts
        wanted = self.choices.processor
        found = None
        kinds = [] if self._is_class else [("AutoImageProcessor", backend(wanted))]
        if kinds and wanted != "pil":
            kinds.append(("AutoVideoProcessor", {}))
        for kind, chosen in kinds:
            try:
                found = getattr(library(), kind).from_pretrained(
                    place, revision=revision, **chosen, **self._access
                )
                break
            except (
                AttributeError,
                OSError,
                ValueError,
                ImportError,
                KeyError,
                TypeError,
            ):
                continue
        processor = None if found is None else Processor(found, self.name)
        if wanted is not None and (processor is None or processor.backend != wanted):
            has = "has none" if processor is None else f"has {type(found).__name__} alone"
            raise ModelError(
                f"--processor {wanted} chooses between the image processors of a model, and "
                f"{self.name} {has}; leave it out"
            )
        return processor

    @cached_property
    def _processed_size(self) -> tuple[int, int] | None:
        """(rows, cols) that its processor makes, where that is fixed."""
        if self._processor is None:
            return None
        return self._processor.input_size

    def _at_native(self, module: nn.Module, packing: Packing | None) -> dict[str, Any]:
        """How images are prepared at native resolution, with the size of images that the tower is
        tried on; sets `native`.

        Raises:
            ModelError: the tower takes images of one size alone, or its processor does something
                else.
        """
        config = image_config(module)
        if (
            packing is None
            and "spatial_shapes" not in inspect.signature(module.forward).parameters
        ):
            raise ModelError(
                f"{self.name} ({type(module).__name__}) takes no patches with the grid of each "
                "image, so it has no native resolution; leave out --native (--short-side keeps "
                "the proportions of images)"
            )
        patch = (
            pair(getattr(config, "patch_size", None) or 16)[0]
            if packing is None
            else None
        )
        side, step = (patch, patch) if packing is None else (packing.patch, packing.step)
        assert side is not None and step is not None
        stated = dict(DEFAULT)
        self.native = Canvas(
            (1, 1), None, step, None, "patches" if packing is None else "pixels"
        )
        if self._processor is not None:
            pack = (
                packing.pack
                if packing
                else lambda images: as_patches(images, (side, side))[0]
            )
            self.native, stated = native_canvas(self._processor, side, step, pack)
        self.rounds = stated.get("processor") == "torchvision-float"
        own = size_of(config) or (_PACKED_SIDE, _PACKED_SIDE)
        rows, cols = (max(round(length / step), 1) * step for length in own)
        channels = 3 if packing is None else packing.channels
        return {**stated, "input_size": (channels, rows, cols)}

    def _packed(
        self, packing: Packing, config: Any, img_size: tuple[int, int] | None
    ) -> dict[str, Any]:
        """How images are prepared for a tower of packed patches: all at one size, the nearest that
        it takes to its own or to 448 x 448, and in numbers as its processor does.

        Raises:
            ModelError: the size is none that tower and processor take, or the processor does
                something else.
        """
        processor = self._processor
        stated = dict(DEFAULT)
        if processor is not None:
            stated = processor_config(processor.record, self.name, any_size=True)
        own = size_of(config) or (_PACKED_SIDE, _PACKED_SIDE)
        size = img_size or (packing.nearest(own[0]), packing.nearest(own[1]))
        stated["input_size"] = (packing.channels, *size)
        try:
            packing.grid(size)
        except ValueError as error:
            raise ModelError(
                f"{self.name} does not take images of {size[0]} x {size[1]} pixels: {error}; "
                "expected another --img-size"
            ) from error
        if processor is not None:
            processor.prove_packed(packing, stated)
        return stated

    def _stated(self) -> dict[str, Any]:
        """The model's processor in numbers; vitsee's own way of doing them where that was
        chosen."""
        if self._processor is None:
            return dict(DEFAULT)
        if self.choices.transform != OWN_TRANSFORM:
            return dict(self._processor.config)
        try:
            found = dict(self._processor.config)
        except ModelError:
            return processor_config(self._processor.record, self.name, any_size=True)
        del found["processor"]
        return found

    def _configured(self, wanted: Mapping[str, Any]) -> Any:
        """The configuration of the part that sees images, with the user's arguments; of the whole
        model, without them, where a tower is named. With what leads to the language model it is the
        whole one's, the arguments its vision part's, its own, or another part's
        (`text_config.hidden_size`)."""
        config = copy.deepcopy(self._config)
        if self.parts[2] == PART:
            return self._with_arguments_of_parts(config, wanted)
        if self.parts[2]:
            return config
        if not self._is_class:
            config = getattr(config, "vision_config", None) or config
        return self._with_arguments(config, wanted)

    def _with_arguments_of_parts(self, config: Any, wanted: Mapping[str, Any]) -> Any:
        """The whole model's configuration with arguments of its vision part, of its own, and of
        other parts by their names."""
        vision = getattr(config, "vision_config", None) or config
        for key, value in wanted.items():
            owner, _, own = key.rpartition(".")
            of = getattr(config, owner, None) or (
                vision if hasattr(vision, key) else config
            )
            self._with_arguments(of, {own if owner and of is not config else key: value})
        return config

    def _with_arguments(self, config: Any, wanted: Mapping[str, Any]) -> Any:
        for key, value in wanted.items():
            if key == "img_size":
                if hasattr(config, "crop_size"):  # its positions are made for this size
                    config.crop_size = pair(value)[0]
                continue
            if key == "frames":
                for name in (name for name in FRAMES if hasattr(config, name)):
                    if getattr(config, name) != value:
                        self._other_frames = getattr(config, name), value
                    setattr(config, name, value)
                continue
            if not hasattr(config, key):
                raise ModelError(
                    f"{self.name} does not take these arguments: {type(config).__name__} has no "
                    f"{key!r}"
                )
            setattr(config, key, value)
        if isinstance(getattr(config, "mask_ratio", None), float):
            config.mask_ratio = 0.0  # every patch is seen
        return config

    def _class(self, config: Any) -> Any:
        """The class of the model: that of its checkpoint if it classifies images, else AutoModel's
        for its configuration."""
        place, _, part = self.parts
        if self._is_class:
            return getattr(library(), place)
        for name in getattr(config, "architectures", None) or ():
            if not part and str(name).endswith(_CLASSIFIES):
                found = getattr(library(), name, None)
                if found is not None:
                    return found
        remote = (getattr(config, "auto_map", None) or {}).get("AutoModel")
        if remote and self.choices.trust_remote_code:
            return remote_class(remote, place, self.parts[1])
        mapping = library().MODEL_MAPPING
        if type(config) not in mapping:
            raise ModelError(
                f"{self.name} is a {getattr(config, 'model_type', '?')}, which AutoModel of "
                f"transformers {library().__version__} does not know; expected one that it does"
            )
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found

    def _tower(self, kind: Any, config: Any, wanted: Mapping[str, Any]) -> _Tower | None:
        """The tower that the name names, made alone; None where that is a module without a
        configuration of its own, and arguments are the whole model's.

        Raises:
            ModelError: no such part; the towers that there are.
        """
        part = self.parts[2]
        try:
            whole = on_meta(kind, copy.deepcopy(config))
        except Exception as error:
            raise self._explained(error) from error
        # The class that generates text has the rest below `model`.
        known = dict(whole.named_modules())
        path = next((p for p in (part, part.removeprefix("model.")) if p in known), None)
        if path is None:
            found = towers(whole)
            if found and hasattr(kind, FEATURES):
                found.append(PART)
            expected = ", ".join(f"#{one}" for one in found)
            has = f"has {expected}" if found else "has none that takes images"
            raise ModelError(
                f"{self.name}: no tower {part!r}; {kind.__name__} {has}"
                + ("; expected one of these" if len(found) > 1 else "")
            )
        module = known[path]
        if not isinstance(module, library().PreTrainedModel):
            self._with_arguments_of_parts(config, wanted)
            return None
        own = self._with_arguments(copy.deepcopy(module.config), wanted)
        return _Tower(type(module), own, path)

    def _refuse_whole(self, kind: Any) -> None:
        """Refuse a vision-language model whose tower of packed patches is not named."""
        config = copy.deepcopy(self._config)
        try:
            found = towers(on_meta(self._class(config), config))
        except Exception as error:
            raise self._explained(error) from error
        expected = " or ".join(f"{self.name}#{one}" for one in found) or "another model"
        raise ModelError(
            f"{self.name} is a model of images and text, with a {kind.__name__} for images; "
            f"expected {expected}"
        )

    def _file(self, name: str) -> str | None:
        """The local path of a file of the repository or folder, None if there is none."""
        place, revision, _ = self.parts
        from transformers.utils.hub import cached_file

        missing = {"_raise_exceptions_for_missing_entries": False}
        found = cached_file(place, name, revision=revision, **self._offline, **missing)
        return None if found is None else str(found)

    def _pretrained(
        self, kind: Any, config: Any, tower: _Tower | None, wanted: Mapping[str, Any]
    ) -> nn.Module:
        """Return the model with its weights: of a part those alone, where the checkpoint has them
        by its names.

        wanted: the user's arguments, with which `config` was changed.
        """
        place, revision, part = self.parts
        if part:
            try:
                alone = self._alone(kind, config, tower)
            except OSError as error:
                raise self._explained(error) from error
            if alone is not None:
                unchanged = self._tower(kind, config, {}) if tower is not None else None
                if unchanged is not None:
                    trained = on_meta(unchanged.kind, unchanged.config)
                    require_same_grid(alone, trained, self.name)
                return alone
        given: dict[str, Any] = {
            "weights_only": True,
            "config": config,
            "dtype": torch.float32,
        }
        given |= {"output_loading_info": True, "ignore_mismatched_sizes": True}

        def load(state: dict[str, Tensor] | None) -> Any:
            where: str | None = place
            extra: dict[str, Any] = {"revision": revision, **self._access}
            if state is not None:
                where = None
                extra = {"state_dict": state}

            def loaded(how: str) -> Any:
                return kind.from_pretrained(
                    where, attn_implementation=how, **given, **extra
                )

            return by_attention(loaded)

        try:
            weights = load_whole(
                load,
                self._file,
                self.name,
                part=part,
                base_names=self._names_of_saved_class,
            )
        except Exception as error:
            raise self._explained(error) from error
        record = {
            "missing": weights.missing,
            "unexpected": weights.left_over if part != PART else [],
            "other_keys": weights.copies,
        }
        self.loaded = {key: names for key, names in record.items() if names}
        if any(hasattr(config, key) for key in wanted):
            # Arguments may ask for other images than the weights are for.
            trained = on_meta(kind, self._configured({}))
            require_same_grid(weights.module, trained, self.name)
        if part == PART:
            return with_features(weights.module)
        return self._part(weights.module)

    def _names_of_saved_class(self) -> set[str]:
        """The names of the tensors of the class that the checkpoint was saved from, which lie
        beside the encoder that is used of it; empty where that class is not known."""
        config = copy.deepcopy(self._config)
        names: set[str] = set()
        for architecture in getattr(config, "architectures", None) or ():
            kind: Any = getattr(library(), str(architecture), None)
            if not (
                inspect.isclass(kind) and issubclass(kind, library().PreTrainedModel)
            ):
                continue
            saved = on_meta(kind, config)
            base: str = kind.base_model_prefix  # type: ignore[attr-defined]
            if hasattr(saved, base):  # else it is the encoder itself
                names |= {
                    name for name in saved.state_dict() if not name.startswith(f"{base}.")
                }
        return names

    def _alone(self, kind: Any, config: Any, tower: _Tower | None) -> nn.Module | None:
        """The part that the name names, with its weights; None where it has no configuration of its
        own, or where the checkpoint has them by other names."""
        if self.parts[2] == PART:
            module = random_language_input(kind, config)
            return module if read_parts(module, self._file) else None
        if tower is None:
            return None
        module = random_model(tower.kind, tower.config)
        if read_weights(module, self._file, tower.path):
            return module
        return None

    def _part(self, whole: nn.Module) -> nn.Module:
        """The module behind `#`; the whole without one."""
        _, _, part = self.parts
        known = dict(whole.named_modules())
        return known.get(part) or known[part.removeprefix("model.")]

    def _explained(self, error: Exception) -> ModelError:
        text = one_line(error)
        place, _, _ = self.parts
        if self._other_frames is not None and "of another size" in text:
            trained, asked = self._other_frames
            return ModelError(
                f"{self.name} takes clips of {trained} frames, which its weights are made for: "
                f"--frames {asked} is not it"
            )
        if isinstance(error, ModelError):
            return error
        if "trust_remote_code" in text or "custom code" in text:
            return ModelError(
                f"{self.name} needs code of its repository, which runs with --trust-remote-code "
                "alone (read it first); expected that, or a model that transformers has itself"
            )
        if "ignore_mismatched_sizes" in text or "copying a param with shape" in text:
            return ModelError(
                f"{self.name} cannot be loaded: its weights have other shapes than its config.json "
                "says; expected a folder or repository whose files belong together"
            )
        if isinstance(error, OSError):
            near = difflib.get_close_matches(place, class_names(), n=3, cutoff=0.7)
            hint = f" (near names of classes: {', '.join(near)})" if near else ""
            why = (
                ""
                if Path(place).is_dir() or not self._offline
                else f" ({why_unreachable()})"
            )
            return ModelError(
                f"{self.name} cannot be loaded{why}: {text}; expected OWNER/NAME, a folder with "
                f"config.json and weights, or a class with --random-init SEED{hint}"
            )
        return ModelError(f"{self.name} cannot be loaded: {type(error).__name__}: {text}")

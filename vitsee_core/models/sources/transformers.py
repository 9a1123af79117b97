"""Vision models of transformers: `transformers:facebook/dinov2-small[@REVISION]`, a folder, one
tower of a larger model by its path behind `#`, or a class with its default configuration,
`transformers:ViTModel?num_hidden_layers=4`.

Code of a repository runs with `trust_remote_code` alone: models that need it are refused without.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import (
    OWN_TRANSFORM,
    Choices,
    Source,
    make_seeded,
)
from vitsee_core.models.sources.native_sizes import native_canvas
from vitsee_core.models.sources.processor_record import processor_config
from vitsee_core.models.sources.processors import ROUNDED, THUMBNAIL
from vitsee_core.models.sources.transformers_checkpoint import (
    CLASSIFIER_SUFFIXES,
    PREFIX,
    Checkpoint,
    Location,
)
from vitsee_core.models.sources.transformers_classes import (
    FRAMES,
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
    size_of,
    towers,
    with_features,
)
from vitsee_core.models.sources.transformers_inputs import (
    as_patches,
    refuse_others,
    take_images_alone,
)
from vitsee_core.models.sources.transformers_weights import (
    expected_with,
    load_whole,
    renamed_by_library,
    with_arguments,
)
from vitsee_core.models.sources.transforms import DEFAULT, changed, pair
from vitsee_core.models.tokens.clips import accept_clips
from vitsee_core.models.tokens.towers import (
    FEATURES,
    PART,
    Packing,
    computes_language_input,
    image_config,
    packed_inputs,
    packing_of,
)
from vitsee_core.models.weights.positions import require_same_grid
from vitsee_stores.plan import Canvas

# Side in pixels of images for a tower of packed patches whose configuration states no size.
_PACKED_SIDE = 448
ASSUMED = (
    "has no image processor: assumed are ImageNet's mean and standard deviation (for "
    "others: --img-mean, --img-std)"
)
ONE_SIZE = (
    "gets all images at one size (--img-size, --crop-mode), where its own processor "
    "keeps each one's proportions"
)


class _Tower(NamedTuple):
    """A module of a larger model that has a configuration of its own.

    Attributes:
        model_class: its class.
        config: its configuration, with the user's arguments.
        path: its path in the larger model.
    """

    model_class: Any
    config: Any
    path: str


class TransformersSource(Source):
    """A checkpoint of the hub or of a folder, or a class.

    Attributes:
        checkpoint: what the name points to.
        weight_notes: what was missing, left over or a copy when the weights were loaded: the
            entries `missing`, `unexpected` and `other_keys`.
        rounds_floats: whether the processor resizes floats, which vitsee rounds to 8 bits.
        is_packed: whether the module takes packed patches.
        assumes_statistics: whether mean or deviation are neither the model's nor the user's.
    """

    arguments_in_name = True
    has_processors = True
    takes_frames = True

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        super().__init__(name, choices)
        self.checkpoint = Checkpoint(name, self.choices)
        self.weight_notes: dict[str, Any] = {}
        self.rounds_floats = False
        self.is_packed = False
        self.assumes_statistics = False

    @property
    def _location(self) -> Location:
        """Path, revision and tower of the name."""
        return self.checkpoint.location

    # ------------------------------------------------------------ before a model is made

    def check(self) -> None:
        """Raise ModelError if the name has an empty piece, or a revision where none can be."""
        path = self._location.path
        revision = self._location.revision
        if not path:
            raise ModelError(
                f"{self.name!r} names no model; expected transformers:OWNER/NAME, a "
                "folder, or a class as transformers:ViTModel"
            )
        if self.name.endswith("#"):
            raise ModelError(
                f"{self.name!r} names no part behind #; leave it out, or name a part, as "
                "#vision_model or #language-in"
            )
        is_class = self.checkpoint.is_class
        if revision is not None and (is_class or path.startswith(("/", ".", "~"))):
            raise ModelError(
                f"{self.name!r} names the revision {revision!r} of a "
                f"{'class' if is_class else 'folder'}; expected it of OWNER/NAME alone"
            )

    def placed(self, folder: Path) -> str:
        """Return the name with the path of a folder made absolute."""
        absolute = folder / Path(self._location.path).expanduser()
        if not absolute.is_dir():
            return self.name
        tower = self._location.tower
        suffix = f"#{tower}" if tower else ""
        return f"{PREFIX}{absolute}{suffix}"

    @property
    def label(self) -> str:
        """The last piece of the path; of a folder that of the folder it resolves to."""
        path = Path(self._location.path)
        if path.is_dir():
            path = path.resolve()
        return path.name

    def matching(self) -> dict[str, list[str]]:
        """Return the classes that a pattern matches, and of those of images and text their
        towers. Case counts only if some class matches with it."""
        pattern = self._location.path
        if not re.search(r"[*?[]", pattern):
            return {self.name: []}
        names = class_names()
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            lower = pattern.lower()
            matches = [name for name in names if fnmatchcase(name.lower(), lower)]
        if not matches:
            raise ModelError(
                f"no class of transformers for images matches {pattern!r} (try '*ViT*')"
            )
        models: dict[str, list[str]] = {}
        for class_name in matches:
            for name in named_towers(class_name):
                models[f"{PREFIX}{name}"] = []
        return models

    # ------------------------------------------------------------ making it

    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Make the model like `Source.make`, with attention by scaled_dot_product_attention where
        the class can."""
        self.check()
        if pretrained and self.checkpoint.is_class:
            raise ModelError(
                f"{self.name} is a class without weights; give --random-init SEED or "
                f"--checkpoint"
            )
        config = self._configure(arguments)
        model_class = self.checkpoint.model_class(config)
        tower = None
        tower_path = self._location.tower
        if tower_path == PART:
            model_class = language_input_of(model_class, self.name)
        elif tower_path:
            tower = self._find_tower(model_class, config, arguments)
        else:
            is_vision_part = type(config) is not type(self.checkpoint.config)
            if is_vision_part and packed_inputs(model_class):
                self._refuse_unnamed_tower(model_class)
            who = f"{self.name} ({model_class.__name__})"
            check_input(model_class, who, remote=self.choices.trust_remote_code)

        def build() -> nn.Module:
            """Return the module, with its weights or with the random ones of torch's seed."""
            if pretrained:
                return self._load_pretrained(model_class, config, tower, arguments)
            if tower_path == PART:
                return random_language_input(model_class, config)
            if tower is not None:
                return random_model(tower.model_class, tower.config)
            return self._select_tower(random_model(model_class, config))

        module = make_seeded(seed, build, with_arguments(self.name, arguments))
        self._accept_images(module, config, arguments.get("img_size"))
        return module

    def _accept_images(self, module: nn.Module, config: Any, img_size: Any) -> None:
        """Let the module take a batch of images, or of clips, alone.

        img_size: the user's, None for the processor's or the configuration's.
        """
        who = f"{self.name} ({type(module).__name__})"
        refuse_others(module, who)
        config_size = size_of(image_config(module) or config)
        if img_size is None:
            input_size = self.checkpoint.processed_size or config_size
        else:
            input_size = pair(img_size)
        take_images_alone(
            module,
            resized=input_size != config_size,
            name=who,
            size=input_size or DEFAULT["input_size"][1:],
        )
        n_frames = clip_frames(module)
        if n_frames is not None:
            accept_clips(module, n_frames)

    def _configure(self, arguments: Mapping[str, Any]) -> Any:
        """Return a configuration with the user's arguments: that of the vision part where a model
        has text, too.

        Where a tower is named it is the whole model's, without arguments: they are the tower's, and
        `_find_tower` sets them. Where the language model's input is named it is the whole model's,
        with arguments.
        """
        config = copy.deepcopy(self.checkpoint.config)
        if self._location.tower == PART:
            return self._set_nested_arguments(config, arguments)
        if self._location.tower:
            return config
        if not self.checkpoint.is_class:
            config = getattr(config, "vision_config", None) or config
        return self._set_arguments(config, arguments)

    def _set_nested_arguments(self, config: Any, arguments: Mapping[str, Any]) -> Any:
        """Set arguments of a whole model's configuration in place, and return it.

        `text_config.hidden_size` is set in the part that it names; a plain key in the vision part
        where that has it, else in the configuration itself.
        """
        vision = getattr(config, "vision_config", None) or config
        for key, value in arguments.items():
            owner_name, _, nested_key = key.rpartition(".")
            owner = getattr(config, owner_name, None)
            if not owner:
                owner = vision if hasattr(vision, key) else config
            is_nested = owner_name and owner is not config
            self._set_arguments(owner, {nested_key if is_nested else key: value})
        return config

    def _set_arguments(self, config: Any, arguments: Mapping[str, Any]) -> Any:
        """Set arguments of a configuration in place, let it mask no patches, and return it.

        Raises:
            ModelError: the configuration has no such entry.
        """
        for key, value in arguments.items():
            if key == "img_size":
                if hasattr(config, "crop_size"):  # its positions are made for this size
                    config.crop_size = pair(value)[0]
                continue
            if key == "frames":
                self._set_frames(config, value)
                continue
            if not hasattr(config, key):
                raise ModelError(
                    f"{self.name} does not take these arguments: {type(config).__name__} "
                    f"has no {key!r}"
                )
            self._set_entry(config, key, value)
        if isinstance(getattr(config, "mask_ratio", None), float):
            config.mask_ratio = 0.0  # every patch is seen
        return config

    def _set_entry(self, config: Any, key: str, value: Any) -> None:
        """Set an entry of a configuration to the value of an argument.

        Raises:
            ModelError: the entry takes no such value.
        """
        trained = getattr(config, key)
        message = f"{self.name}: {key}={value} is not a value of {type(config).__name__}"
        is_count = isinstance(trained, int) and not isinstance(trained, bool)
        # Python's ranges make no blocks of -1 blocks, without an error.
        if is_count and trained >= 0 and isinstance(value, int) and value < 0:
            raise ModelError(f"{message}; expected a number as {trained}, its own")
        try:
            setattr(config, key, value)
        except Exception as error:  # the library's own kinds, by its version
            raise ModelError(f"{message}; expected one as {trained}, its own") from error

    def _set_frames(self, config: Any, n_frames: int) -> None:
        """Set the number of frames under each name that the configuration has for it."""
        for name in FRAMES:
            if hasattr(config, name):
                trained = getattr(config, name)
                if trained != n_frames:
                    self.checkpoint.frames_mismatch = trained, n_frames
                setattr(config, name, n_frames)

    def _find_tower(
        self, model_class: Any, config: Any, arguments: Mapping[str, Any]
    ) -> _Tower | None:
        """Return the tower that the name names, to be made without the rest of the model; None
        where it has no configuration of its own, and the arguments are set in the whole model's.

        Raises:
            ModelError: no such tower; the line lists those that there are.
        """
        tower_path = self._location.tower
        try:
            model = on_meta(model_class, copy.deepcopy(config))
        except Exception as error:
            raise self.checkpoint.explain(error) from error
        modules = dict(model.named_modules())
        path = _module_path(modules, tower_path)
        if path is None:
            tower_names = towers(model)
            if tower_names and hasattr(model_class, FEATURES):
                tower_names.append(PART)
            has = "has none that takes images"
            if tower_names:
                has = f"has {', '.join(f'#{name}' for name in tower_names)}"
            choice = "; expected one of these" if len(tower_names) > 1 else ""
            raise ModelError(
                f"{self.name}: no tower {tower_path!r}; {model_class.__name__} "
                f"{has}{choice}"
            )
        module = modules[path]
        if not isinstance(module, library().PreTrainedModel):
            self._set_nested_arguments(config, arguments)
            return None
        tower_config = self._set_arguments(copy.deepcopy(module.config), arguments)
        return _Tower(model_class=type(module), config=tower_config, path=path)

    def _refuse_unnamed_tower(self, vision_class: Any) -> None:
        """Raise ModelError for a vision-language model whose tower of packed patches is not
        named."""
        config = copy.deepcopy(self.checkpoint.config)
        try:
            tower_names = towers(on_meta(self.checkpoint.model_class(config), config))
        except Exception as error:
            raise self.checkpoint.explain(error) from error
        names = [f"{self.name}#{tower_name}" for tower_name in tower_names]
        expected = " or ".join(names) or "another model"
        raise ModelError(
            f"{self.name} is a model of images and text, with a {vision_class.__name__} "
            f"for images; expected {expected}"
        )

    # ------------------------------------------------------------ its weights

    def converter(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the library's own conversion of its older names; for a module that is not one of
        the library's models by itself that of `Source`."""
        is_model = isinstance(module, library().PreTrainedModel)
        if not is_model or computes_language_input(module):
            return super().converter(module)
        return renamed_by_library

    def _load_pretrained(
        self,
        model_class: Any,
        config: Any,
        tower: _Tower | None,
        arguments: Mapping[str, Any],
    ) -> nn.Module:
        """Return the model with its weights, and set `weight_notes`.

        Args:
            model_class: the class of the whole model, or of its language input.
            config: its configuration, with the user's arguments.
            tower: the tower that is made alone, None for another module.
            arguments: the user's arguments.
        """
        tower_path = self._location.tower
        if tower_path:
            try:
                module = self._read_tower_alone(model_class, config, tower)
            except OSError as error:
                raise self.checkpoint.explain(error) from error
            if module is not None:
                if tower is not None:
                    self._require_grid_of_tower(module, model_class, config)
                return module
        try:
            weights = load_whole(
                self._pretrained_loader(model_class, config),
                self.checkpoint.find_file,
                with_arguments(self.name, arguments),
                tower=tower_path,
                base_names=self.checkpoint.saved_tensor_names,
                expected=expected_with(arguments),
            )
        except Exception as error:
            raise self.checkpoint.explain(error, arguments) from error
        notes = {
            "missing": weights.missing,
            # The language model's weights are left over by intent.
            "unexpected": weights.left_over if tower_path != PART else [],
            "other_keys": weights.copies,
        }
        self.weight_notes = {key: names for key, names in notes.items() if names}
        if any(hasattr(config, key) for key in arguments):
            # Arguments may ask for other images than the weights are for.
            trained = on_meta(model_class, self._configure({}))
            require_same_grid(weights.module, trained, self.name)
        if tower_path == PART:
            return with_features(weights.module)
        return self._select_tower(weights.module)

    def _require_grid_of_tower(
        self, module: nn.Module, model_class: Any, config: Any
    ) -> None:
        """Raise ModelError if arguments give a tower another grid than its weights are for.

        config: the whole model's, without arguments.
        """
        tower = self._find_tower(model_class, config, {})
        if tower is not None:
            trained = on_meta(tower.model_class, tower.config)
            require_same_grid(module, trained, self.name)

    def _pretrained_loader(
        self, model_class: Any, config: Any
    ) -> Callable[[dict[str, Tensor] | None], Any]:
        """Return the function `load(state)` of `load_whole`: state dict, or None for the
        checkpoint's -> (module, the library's report)."""

        def load(state: dict[str, Tensor] | None) -> Any:
            """Call `from_pretrained` on a state dict, or on the checkpoint."""
            path: str | None = None
            state_or_access: dict[str, Any] = {"state_dict": state}
            if state is None:
                path = self._location.path
                state_or_access = {
                    "revision": self._location.revision,
                    **self.checkpoint.access,
                }

            def load_with(attention: str) -> Any:
                """Call `from_pretrained` with one of the library's attention functions."""
                return model_class.from_pretrained(
                    path,
                    attn_implementation=attention,
                    config=config,
                    dtype=torch.float32,
                    weights_only=True,  # no pickled code
                    # Misfits are reported, and judged by vitsee's rule for every source.
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **state_or_access,
                )

            return by_attention(load_with)

        return load

    def _read_tower_alone(
        self, model_class: Any, config: Any, tower: _Tower | None
    ) -> nn.Module | None:
        """Return the named tower with its weights, without reading the rest of the checkpoint.

        None where it has no configuration of its own, or where the checkpoint has its weights under
        other names: then the whole model is loaded.
        """
        find_file = self.checkpoint.find_file
        if self._location.tower == PART:
            module = random_language_input(model_class, config)
            return module if read_parts(module, find_file) else None
        if tower is None:
            return None
        module = random_model(tower.model_class, tower.config)
        return module if read_weights(module, find_file, tower.path) else None

    def _select_tower(self, model: nn.Module) -> nn.Module:
        """Return the module behind `#`, the model itself without one."""
        modules = dict(model.named_modules())
        path = _module_path(modules, self._location.tower)
        assert path is not None  # `_find_tower` refuses others
        return modules[path]

    # ------------------------------------------------------------ its images

    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return how images are prepared, as `Source.transform`; set `native`, and what `origin`
        notes about it."""
        packing = packing_of(module)
        if self.choices.native:
            native = self._native_transform(module, packing)
            return changed(native, None, settings, self.name)
        config = image_config(module)
        self.is_packed = packing is not None
        if packing is None:
            transform = self._processor_transform()
        else:
            transform = self._packed_transform(packing, config, img_size)
        self.rounds_floats = transform.get("processor") == "torchvision-float"
        lacks_statistics = settings.get("mean") is None or settings.get("std") is None
        self.assumes_statistics = self.checkpoint.processor is None and lacks_statistics
        if packing is None:
            channels = getattr(config, "num_channels", 3)
            if not isinstance(channels, int):
                channels = 3
            size = self.checkpoint.processed_size or size_of(config)
            rows, cols = size or transform["input_size"][1:]
            transform["input_size"] = (channels, rows, cols)
        return changed(transform, img_size, settings, self.name)

    def _native_transform(
        self, module: nn.Module, packing: Packing | None
    ) -> dict[str, Any]:
        """Return how images are prepared at native resolution; set `native`.

        `input_size` is then the size of the images that the tower is tried on.

        Raises:
            ModelError: the tower takes images of one size alone, or its processor does something
                else.
        """
        config = image_config(module)
        if packing is not None:
            patch = packing.patch
            step = packing.step
            channels = packing.channels
            bound = "pixels"
            pack = packing.pack
        else:
            if "spatial_shapes" not in inspect.signature(module.forward).parameters:
                raise ModelError(
                    f"{self.name} ({type(module).__name__}) takes no patches with the "
                    "grid of each image, so it has no native resolution; leave out "
                    "--native (--short-side keeps the proportions of images)"
                )
            patch = pair(getattr(config, "patch_size", None) or 16)[0]
            step = patch
            channels = 3
            bound = "patches"

            def pack(images: Tensor) -> Tensor:
                """Return (images, patches, numbers) of (images, channels, rows, cols)."""
                return as_patches(images, (patch, patch))[0]

        if self.checkpoint.processor is None:
            transform = dict(DEFAULT)
            self.native = Canvas((1, 1), short_side=None, multiple=step, crop_mode=bound)
        else:
            self.native, transform = native_canvas(
                self.checkpoint.processor, patch=patch, step=step, pack=pack
            )
        self.rounds_floats = transform.get("processor") == "torchvision-float"
        config_rows, config_cols = size_of(config) or (_PACKED_SIDE, _PACKED_SIDE)
        rows = max(round(config_rows / step), 1) * step
        cols = max(round(config_cols / step), 1) * step
        return {**transform, "input_size": (channels, rows, cols)}

    def _packed_transform(
        self, packing: Packing, config: Any, img_size: tuple[int, int] | None
    ) -> dict[str, Any]:
        """Return how images are prepared for a tower of packed patches: all at one size, and with
        the numbers of its processor.

        The size is the user's, or the nearest that the tower takes to its configuration's, or to
        448 x 448 pixels.

        Raises:
            ModelError: tower or processor do not take the size, or the processor does something
                else.
        """
        processor = self.checkpoint.processor
        transform = dict(DEFAULT)
        if processor is not None:
            transform = processor_config(processor.record, self.name, any_size=True)
        if img_size is None:
            config_rows, config_cols = size_of(config) or (_PACKED_SIDE, _PACKED_SIDE)
            img_size = packing.nearest(config_rows), packing.nearest(config_cols)
        rows, cols = img_size
        transform["input_size"] = (packing.channels, rows, cols)
        try:
            packing.grid(img_size)
        except ValueError as error:
            raise ModelError(
                f"{self.name} does not take images of {rows} x {cols} pixels: {error}; "
                "expected another --img-size"
            ) from error
        if processor is not None:
            processor.prove_packed(packing, transform)
        return transform

    def _processor_transform(self) -> dict[str, Any]:
        """Return the processor's numbers, without the name of what resizes where the user chose
        vitsee's own transform."""
        processor = self.checkpoint.processor
        if processor is None:
            return dict(DEFAULT)
        if self.choices.transform != OWN_TRANSFORM:
            return dict(processor.config)
        try:
            transform = dict(processor.config)
        except ModelError:  # numbers that nothing proves are what the user asked for
            return processor_config(processor.record, self.name, any_size=True)
        del transform["processor"]
        return transform

    # ------------------------------------------------------------ what it says of itself

    def architecture(self, module: nn.Module) -> str:
        """Return the module's class, with `#language-in` where that is what it computes."""
        suffix = f"#{PART}" if computes_language_input(module) else ""
        return f"{PREFIX}{type(module).__name__}{suffix}"

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Return the configuration's class names, None where they are placeholders."""
        labels = getattr(getattr(module, "config", None), "id2label", None) or {}
        names = [str(labels[key]) for key in sorted(labels)]
        are_placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
        is_classifier = type(module).__name__.endswith(CLASSIFIER_SUFFIXES)
        return names if is_classifier and not are_placeholders else None

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return `source`, `pretrained` (PATH or PATH@REVISION), `folder`, the name of a folder,
        and `weight_notes`: what was missing, left over or a copy."""
        path = self._location.path
        revision = self._location.revision
        pretrained = f"{path}@{revision}" if revision else path
        record = {"source": "pretrained", "pretrained": pretrained}
        if self._location.is_folder:
            record["folder"] = Path(path).resolve().name
        return {**record, **self.weight_notes}

    def origin(self) -> dict[str, Any]:
        """Return the library and its version, the processor's record, and notes on the images."""
        record: dict[str, Any] = {
            "library": "transformers",
            "version": library().__version__,
        }
        if self.choices.trust_remote_code:
            record["trust_remote_code"] = True
        processor = self.checkpoint.processor
        if processor is None:
            if self.assumes_statistics:
                record["notes"] = [ASSUMED]
            return record
        notes = []
        if self.rounds_floats:
            notes.append(ROUNDED)
        if self.is_packed:
            notes.append(ONE_SIZE)
        if processor.cuts_tiles:
            notes.append(THUMBNAIL)
        record |= processor.origin()
        if notes:
            record["notes"] = notes
        return record


def _module_path(modules: Mapping[str, nn.Module], path: str) -> str | None:
    """Return the path under which a model has the module that a user names, None without one.

    Classes that generate text have the rest of the model below `model`, others do not.
    """
    if path in modules:
        return path
    shorter = path.removeprefix("model.")
    return shorter if shorter in modules else None

"""What a name of `transformers:` points to: a repository of the hub, a folder or a class, with its
configuration, its model class, its image processor and its files.

`TransformersSource` (in `transformers`) makes modules of it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Choices, one_line
from vitsee_core.models.sources.processors import Processor
from vitsee_core.models.sources.timm_create import why_unreachable
from vitsee_core.models.sources.transformers_classes import (
    backend,
    class_names,
    library,
    on_meta,
    remote_class,
)
from vitsee_core.models.sources.transformers_weights import with_arguments

PREFIX = "transformers:"
CLASSIFIER_SUFFIXES = ("ForImageClassification", "ForVideoClassification")
# What transformers raises where a model has no processor of a kind, or one that it cannot read.
_PROCESSOR_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
)


class Location(NamedTuple):
    """The pieces of a name.

    Attributes:
        path: repository, folder or class.
        revision: of a repository, None for its default branch.
        tower: path of a module within the model, "" for the whole model.
    """

    path: str
    revision: str | None
    tower: str

    @property
    def is_folder(self) -> bool:
        """Whether the path is a folder of this machine."""
        return Path(self.path).is_dir()


class Checkpoint:
    """A repository, a folder or a class, read when something of it is asked for.

    Attributes:
        name: the name as the user knows it.
        choices: the source's options.
        frames_mismatch: (the configuration's number of frames, the user's) where they differ; set
            by whoever changes the configuration, named in the error of weights that do not fit.
    """

    def __init__(self, name: str, choices: Choices) -> None:
        self.name = name
        self.choices = choices
        self.frames_mismatch: tuple[int, int] | None = None

    @property
    def location(self) -> Location:
        """The name's pieces. A folder that exists is one, even with an `@` in its path."""
        path, _, tower = self.name.removeprefix(PREFIX).partition("#")
        folder = Path(path or "-").expanduser()  # Path("") would be the working folder
        if folder.exists():
            return Location(str(folder), None, tower)
        path, _, revision = path.partition("@")
        return Location(path, revision or None, tower)

    @cached_property
    def is_class(self) -> bool:
        """Whether the name is a class of the library, as `ViTModel`."""
        path = self.location.path
        is_identifier = "/" not in path and path[:1].isupper()
        return is_identifier and not self.location.is_folder and hasattr(library(), path)

    @cached_property
    def config(self) -> Any:
        """The configuration that the model itself has; copy it before changing it.

        Raises:
            ModelError: there is none, or it cannot be read.
        """
        path = self.location.path
        if self.is_class:
            model_class: Any = getattr(library(), path)
            if not _is_model_class(model_class):
                raise ModelError(f"{path} of transformers is no model class")
            return model_class.config_class()
        if self.location.is_folder:
            if not Path(path, "config.json").is_file():
                raise ModelError(
                    f"{self.name}: {path} has no config.json; expected a folder that "
                    "transformers saved, with config.json and weights"
                )
        elif path.count("/") > 1:
            raise ModelError(
                f"{self.name}: no folder {path}; expected one, or OWNER/NAME"
            )
        try:
            return library().AutoConfig.from_pretrained(
                path, revision=self.location.revision, **self.access
            )
        except Exception as error:
            raise self.explain(error) from error

    @cached_property
    def access(self) -> dict[str, bool]:
        """Keyword arguments that every load of a repository or folder is given."""
        return {"trust_remote_code": self.choices.trust_remote_code, **self._offline}

    @cached_property
    def _offline(self) -> dict[str, bool]:
        """The argument that keeps transformers from waiting for a hub that does not answer."""
        if self.location.is_folder or why_unreachable():
            return {"local_files_only": True}
        return {}

    @cached_property
    def processor(self) -> Processor | None:
        """The model's image processor, None where it has none.

        Raises:
            ModelError: the user chose a backend that the processor does not have.
        """
        chosen_backend = self.choices.processor
        loaders: list[tuple[str, dict[str, Any]]] = []
        if not self.is_class:
            loaders.append(("AutoImageProcessor", backend(chosen_backend)))
            if chosen_backend != "pil":  # those of videos resize with torchvision alone
                loaders.append(("AutoVideoProcessor", {}))
        library_object = None
        for loader, arguments in loaders:
            try:
                library_object = getattr(library(), loader).from_pretrained(
                    self.location.path,
                    revision=self.location.revision,
                    **arguments,
                    **self.access,
                )
                break
            except _PROCESSOR_ERRORS:
                continue
        processor = None
        has = "has none"
        if library_object is not None:
            processor = Processor(library_object, self.name)
            has = f"has {type(library_object).__name__} alone"
        is_chosen = processor is not None and processor.backend == chosen_backend
        if chosen_backend is not None and not is_chosen:
            raise ModelError(
                f"--processor {chosen_backend} chooses between the image processors of a "
                f"model, and {self.name} {has}; leave it out"
            )
        return processor

    @property
    def processed_size(self) -> tuple[int, int] | None:
        """(rows, cols) that the processor makes of any image, None where that is not fixed."""
        if self.processor is None:
            return None
        return self.processor.input_size

    def model_class(self, config: Any) -> Any:
        """Return the class of the model: that of its checkpoint if it classifies images, else
        AutoModel's for the configuration.

        Raises:
            ModelError: AutoModel knows no class for it.
        """
        path, revision, tower = self.location
        if self.is_class:
            return getattr(library(), path)
        for architecture in getattr(config, "architectures", None) or ():
            # A tower lies in the model without a task's head.
            if not tower and str(architecture).endswith(CLASSIFIER_SUFFIXES):
                classifier = getattr(library(), architecture, None)
                if classifier is not None:
                    return classifier
        remote = (getattr(config, "auto_map", None) or {}).get("AutoModel")
        if remote and self.choices.trust_remote_code:
            return remote_class(remote, path, revision)
        mapping = library().MODEL_MAPPING
        if type(config) not in mapping:
            raise ModelError(
                f"{self.name} is a {getattr(config, 'model_type', '?')}, which AutoModel "
                f"of transformers {library().__version__} does not know; expected one "
                f"that it does"
            )
        mapped = mapping[type(config)]
        return mapped[0] if isinstance(mapped, tuple) else mapped

    def find_file(self, name: str) -> str | None:
        """Return the local path of a file of the repository or folder, None if there is none."""
        from transformers.utils.hub import cached_file

        path = cached_file(
            self.location.path,
            name,
            revision=self.location.revision,
            _raise_exceptions_for_missing_entries=False,
            **self._offline,
        )
        return None if path is None else str(path)

    def saved_tensor_names(self) -> set[str]:
        """Return the names of the tensors that the class of the saved checkpoint has beside the
        encoder which is used of it; empty where that class is not known."""
        config = copy.deepcopy(self.config)
        names: set[str] = set()
        for architecture in getattr(config, "architectures", None) or ():
            saved_class: Any = getattr(library(), str(architecture), None)
            if not _is_model_class(saved_class):
                continue
            saved = on_meta(saved_class, config)
            base: str = saved_class.base_model_prefix
            if hasattr(saved, base):  # else it is the encoder itself
                for name in saved.state_dict():
                    if not name.startswith(f"{base}."):
                        names.add(name)
        return names

    def explain(
        self, error: Exception, arguments: Mapping[str, Any] | None = None
    ) -> ModelError:
        """Return the error line for what transformers raised while it loaded the model.

        arguments: the user's, where the configuration has them.
        """
        text = one_line(error)
        if self.frames_mismatch is not None and "of another size" in text:
            trained, requested = self.frames_mismatch
            return ModelError(
                f"{self.name} takes clips of {trained} frames, which its weights are "
                f"made for: --frames {requested} is not it (leave it out, or give "
                "--random-init SEED)"
            )
        if isinstance(error, ModelError):
            return error
        if "trust_remote_code" in text or "custom code" in text:
            return ModelError(
                f"{self.name} needs code of its repository, which runs with "
                "--trust-remote-code alone (read it first); expected that, or a model "
                "that transformers has itself"
            )
        if "ignore_mismatched_sizes" in text or "copying a param with shape" in text:
            return ModelError(
                f"{self.name} cannot be loaded: its weights have other shapes than its "
                "config.json says; expected a folder or repository whose files belong "
                "together"
            )
        if not isinstance(error, OSError):
            error_name = type(error).__name__
            who = with_arguments(self.name, arguments or {})
            return ModelError(f"{who} cannot be loaded: {error_name}: {text}")
        # OSError is also what transformers raises for names that no repository has.
        near = difflib.get_close_matches(
            self.location.path, class_names(), n=3, cutoff=0.7
        )
        hint = f" (near names of classes: {', '.join(near)})" if near else ""
        why = ""
        if not self.location.is_folder and self._offline:
            why = f" ({why_unreachable()})"
        return ModelError(
            f"{self.name} cannot be loaded{why}: {text}; expected OWNER/NAME, a folder "
            f"with config.json and weights, or a class with --random-init SEED{hint}"
        )


def _is_model_class(candidate: Any) -> bool:
    """Return whether an attribute of the library is a class of models."""
    return inspect.isclass(candidate) and issubclass(candidate, library().PreTrainedModel)

"""The questions that vitsee asks of every source of models, and pieces of their error lines."""

from __future__ import annotations

import difflib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.meta_device import meta_device
from vitsee_stores.plan import Canvas

if TYPE_CHECKING:
    from vitsee_core.models.weights.positions import Resampling

MAX_LINE_LENGTH = 300  # letters of an error line
BACKENDS = ("pil", "torchvision")  # of image processors
OWN_TRANSFORM = "timm"  # of --transform: vitsee's own, which is timm's


@dataclass(frozen=True)
class Choices:
    """The options of a source, beside what a model is made of.

    Attributes:
        transform: "timm" for timm's image transform in place of the source's image processor.
        processor: the backend of the image processor, "pil" or "torchvision"; None for its default.
        trust_remote_code: whether code of the model's repository may run.
        native: whether images come at the sizes of the model's image processor.
    """

    transform: str | None = None
    processor: str | None = None
    trust_remote_code: bool = False
    native: bool = False


class Source(ABC):
    """The source of the model of one name.

    Attributes:
        name: the name as the user knows it.
        choices: the source's options.
        arguments_in_name: whether what stands behind `?` in a name, and is not an option, is an
            argument of the model.
        has_processors: whether its models may have image processors, and code in their
            repositories.
        takes_frames: whether `make` takes the argument `frames`, of a clip.
        any_module: whether its modules may take clips without saying so.
        native: how images come to lie on a canvas, still without a size, at native resolution, once
            `transform` was called; None where that was not chosen.
        resampling: how its own weights may be fitted to other sizes.
    """

    arguments_in_name = False
    has_processors = False
    takes_frames = False
    any_module = False

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        self.name = name
        self.choices = choices or Choices()
        self.native: Canvas | None = None
        self.resampling: Resampling | None = None

    # ------------------------------------------------------------ before a model is made

    @abstractmethod
    def check(self) -> None:
        """Raise ModelError if the name cannot be a model's, without making it or asking a hub."""

    def check_choices(self) -> None:
        """Raise ModelError if its models do not take these choices."""
        choices = self.choices
        if choices.transform not in (None, OWN_TRANSFORM):
            raise ModelError(
                f"--transform is {choices.transform!r}; expected {OWN_TRANSFORM}"
            )
        if choices.processor not in (None, *BACKENDS):
            raise ModelError(
                f"--processor is {choices.processor!r}; expected one of: "
                f"{', '.join(BACKENDS)}"
            )
        if choices.transform is not None and choices.processor is not None:
            raise ModelError(
                "--transform timm and --processor exclude each other; give one of them"
            )
        if self.has_processors:
            return
        is_given = {
            "--processor": choices.processor is not None,
            "--trust-remote-code": choices.trust_remote_code,
            "--native": choices.native,
        }
        for option, is_set in is_given.items():
            if is_set:
                raise ModelError(
                    f"{option} is for models of transformers, and {self.name} is none; "
                    "leave it out"
                )

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        """Raise ModelError if an argument chooses what to load, for which there is an option."""
        return

    def check_foreign(self, args: Mapping[str, Any], where: str) -> None:
        """Raise ModelError unless the manifest of a store that nobody vouches for may ask for this
        model; by default it may not.

        Args:
            args: the model's arguments in the manifest.
            where: the store's label, for the message.
        """
        raise foreign_place(self.name, where)

    def placed(self, folder: Path) -> str:
        """Return the name that means in any working folder what this name means in `folder`."""
        return self.name

    def matching(self) -> dict[str, list[str]]:
        """Return model -> names of its weights, for the models that the name matches as a pattern.
        Raises ModelError: nothing matches."""
        return {self.name: []}

    def stated_size(self) -> tuple[int, int] | None:
        """Return rows and columns of its input, None where they are not known before it is made."""
        return None

    @property
    def label(self) -> str:
        """The short name that a study gives the model."""
        return self.name.rpartition(":")[2].rpartition("/")[2]

    @property
    def skips_left_out(self) -> tuple[str, ...]:
        """Blocks and sublayers without whose skips the model was trained, as --ablate-skip takes
        them."""
        return ()

    def layout_arguments(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return which arguments of timm's architectures, from a checkpoint's published layout,
        this model takes."""
        return {}

    # ------------------------------------------------------------ making it

    @abstractmethod
    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        arguments: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """Return the module.

        Args:
            pretrained: whether it gets its own weights, or random ones.
            seed: the seed of all that is random.
            arguments: keywords of what builds it; `img_size`, (rows, cols), among them is dropped
                by a model that takes any size.
            foreign: whether name and arguments are a stranger's: then the network is not asked,
                and a model larger than the memory is not made.

        Raises:
            ModelError: unknown name, arguments that it does not take, weights that cannot be had,
                or code of others that fails.
        """

    def depends_on_seed(
        self, module: nn.Module, seed: int, arguments: dict[str, Any]
    ) -> bool:
        """Return whether another seed would give other random weights than the module has.

        Raises:
            ModelError: an argument asks for trained weights.
        """
        return True

    def without_weights(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the module on torch's meta device, where nothing is computed and no memory taken;
        with random weights if it cannot be made there.

        arguments: as in `make`.

        Raises:
            ModelError: as `make`.
        """
        try:
            with meta_device():
                return self.make(pretrained=False, seed=0, arguments=arguments)
        except ModelError as error:
            # What computes with tensors while it is made (torchvision's RegNets their widths).
            if isinstance(error.__cause__, NotImplementedError):
                return self.make(pretrained=False, seed=0, arguments=arguments)
            raise

    def converter(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the function that turns foreign and older weights into those of the module, called
        as `convert(state, module)`; None without one.

        It is timm's checkpoint_filter_fn, in the file of the architecture that the module says it
        is, or else in the file of its class.
        """
        import timm

        config: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
        architecture = config.get("architecture", "")
        definitions: list[Any] = [type(module)]
        if timm.is_model(architecture):
            definitions.insert(0, timm.model_entrypoint(architecture))
        for definition in definitions:
            file = sys.modules.get(definition.__module__)
            convert = getattr(file, "checkpoint_filter_fn", None)
            if callable(convert):
                return convert  # type: ignore[no-any-return]
        return None

    # ------------------------------------------------------------ what it says of itself

    @abstractmethod
    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return how images are prepared: input_size (channels, rows, cols), interpolation,
        crop_pct, crop_mode, mean, std.

        Args:
            module: the module that `make` returned.
            img_size: (rows, cols) in place of the model's.
            settings: the user's values of the same entries, and of `fill`; None for those to keep.

        Raises:
            ModelError: values that are not settings.
        """

    @abstractmethod
    def architecture(self, module: nn.Module) -> str:
        """Return a text that a store's identity compares: it is the same for equal sites."""

    def class_names(self, module: nn.Module) -> list[str] | None:
        """Return the names of the logits' classes, None where they are not known."""
        return None

    def pretrained_record(
        self, module: nn.Module, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the record of the model's own weights, `LoadedModel.weights`: `source`,
        `pretrained`, and how they were fitted to these arguments."""
        return {"source": "pretrained"}

    def assumed(self, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that neither a checkpoint's file nor its caller states, without
        preprocessing."""
        return {}

    def origin(self) -> dict[str, Any]:
        """Return the entry of manifests about the source: `library` and its `version`, or the
        `sha256` of the file, and `notes`, what its user should know, in words behind the name. {}
        for timm, which every manifest has."""
        return {}


def make_seeded(seed: int, build: Callable[[], Any], who: str) -> nn.Module:
    """Return the module that `build()` makes under a seed; the caller's random state stays as it
    is.

    who: the model, as messages call it.

    Raises:
        ModelError: `build` raises, or does not return a module with parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = build()
        except ModelError:
            raise
        except TypeError as error:
            raise ModelError(
                f"{who} does not take these arguments: {one_line(error)}"
            ) from error
        except Exception as error:
            raise ModelError(
                f"{who} cannot be made: {type(error).__name__}: {one_line(error)}"
            ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{who} gives {type(module).__name__}; expected a torch.nn.Module"
        )
    if next(module.parameters(), None) is None:
        raise ModelError(f"{who} gives a module without parameters; expected a network")
    return module


class Unfilled(TorchFunctionMode):
    """A mode that leaves parameters as they are allocated, which costs neither time nor memory:
    functions that write to a parameter in place do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # torch.nn.init passes the tensor by name.
        target = args[0] if args else kwargs.get("tensor")
        is_in_place = name.endswith("_") and not name.endswith("__")
        if is_in_place and name != "requires_grad_" and isinstance(target, nn.Parameter):
            return target
        return func(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context without a library's remarks (that weights are random, as was asked for)."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous_level)


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks, cut where it is long; its type if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if len(text) <= MAX_LINE_LENGTH:
        return text
    return f"{text[: MAX_LINE_LENGTH - 3]}..."


def near_names(name: str, known_names: Sequence[str]) -> str:
    """Return known names that resemble a name, as the end of a message: `; near names: a, b`, or
    "" without any."""
    near = difflib.get_close_matches(name, known_names, n=3, cutoff=0.5)
    if not near:
        return ""
    return f"; near names: {', '.join(near)}"


def foreign_place(name: str, where: str) -> ModelError:
    """Return the error for a model of a folder or a repository that a store's manifest names.

    Args:
        name: the model.
        where: the store's label.
    """
    return ModelError(
        f"{where} names the model {name[:80]}: a folder or a repository is not opened "
        "because a store names it; if the store is your own, repeat the command with "
        "--trust-store"
    )


def missing_extra(package: str, extra: str) -> ModelError:
    """Return the error for a library that is not installed, and that an extra of vitsee brings."""
    return ModelError(
        f"models of {package} need a package that is not installed (pip install "
        f"'vitsee[{extra}]')"
    )

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

# Letters of an error line.
LONGEST = 300
BACKENDS = ("pil", "torchvision")  # of image processors
OWN_TRANSFORM = "timm"  # of --transform: vitsee's own, which is timm's


@dataclass(frozen=True)
class Choices:
    """How a source goes about its models.

    transform: "timm" for vitsee's own in place of the source's image processor. processor: the
    backend of that, "pil" or "torchvision"; None for its default. trust_remote_code: code of the
    model's repository may run. native: images come at the sizes of the model's image processor, see
    `Source.native`.
    """

    transform: str | None = None
    processor: str | None = None
    trust_remote_code: bool = False
    native: bool = False


class Source(ABC):
    """The source of the model of one name.

    name: as the user knows it. arguments_in_name: whether what stands behind `?` in a name, and is
    no option, is an argument of the model. has_processors: whether its models may have image
    processors, and code in their repositories. takes_frames: whether `frames`, of a clip, may be
    among what `make` is asked for. any_module: whether its modules may take clips without saying
    so. native: how images come to lie on a canvas, still without a size, at native resolution, once
    `transform` has said how they are prepared for it; None where that was not chosen.
    """

    arguments_in_name = False
    has_processors = False
    takes_frames = False
    any_module = False

    def __init__(self, name: str, choices: Choices | None = None) -> None:
        self.name = name
        self.choices = choices or Choices()
        self.native: Canvas | None = None
        self.resampling: Resampling | None = None  # of its own weights

    # ------------------------------------------------------------ before a model is made

    @abstractmethod
    def check(self) -> None:
        """Raise ModelError if the name cannot be a model's, without making it or asking a hub."""

    def check_choices(self) -> None:
        """Raise ModelError if its models do not take these choices."""
        made = self.choices
        if made.transform not in (None, OWN_TRANSFORM):
            raise ModelError(
                f"--transform is {made.transform!r}; expected {OWN_TRANSFORM}"
            )
        if made.processor not in (None, *BACKENDS):
            raise ModelError(
                f"--processor is {made.processor!r}; expected one of: {', '.join(BACKENDS)}"
            )
        if made.transform is not None and made.processor is not None:
            raise ModelError(
                "--transform timm and --processor exclude each other; give one of them"
            )
        if self.has_processors:
            return
        for option, given in (
            ("--processor", made.processor is not None),
            ("--trust-remote-code", made.trust_remote_code),
            ("--native", made.native),
        ):
            if given:
                raise ModelError(
                    f"{option} is for models of transformers, and {self.name} is none; leave it out"
                )

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        """Raise ModelError if an argument chooses what to load, which an option of its own does."""
        return

    def check_foreign(self, args: Mapping[str, Any], where: str) -> None:
        """Raise ModelError unless a manifest that nobody vouches for, of the store `where`, may ask
        for this model; by default none may."""
        raise foreign_place(self.name, where)

    def placed(self, folder: Path) -> str:
        """The name that means the same in any working folder, if this one is taken from
        `folder`."""
        return self.name

    def matching(self) -> dict[str, list[str]]:
        """The models that the name, as a pattern, stands for -> the names of their weights; a
        ModelError where nothing matches."""
        return {self.name: []}

    def stated_size(self) -> tuple[int, int] | None:
        """Rows and columns of its input as far as they are known before it is made."""
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
        """The part of a published checkpoint's arguments of timm's architectures that this model
        takes."""
        return {}

    # ------------------------------------------------------------ making it

    @abstractmethod
    def make(
        self,
        *,
        pretrained: bool,
        seed: int,
        wanted: dict[str, Any],
        foreign: bool = False,
    ) -> nn.Module:
        """The module, random weights drawn with `seed`.

        Args:
            pretrained: with its own weights.
            seed: of all that is random.
            wanted: its arguments; `img_size`, (rows, cols), among them is dropped by a model that
                takes any.
            foreign: name and arguments are a stranger's: the network is not asked, and a model
                larger than the memory is not made.

        Raises:
            ModelError: unknown name, arguments that it does not take, weights that are not to be
                had, or code of others that fails.
        """

    def depends_on_seed(
        self, module: nn.Module, seed: int, wanted: dict[str, Any]
    ) -> bool:
        """Whether the random weights of a module, made with this seed, are others with another."""
        return True

    def without_weights(self, wanted: dict[str, Any]) -> nn.Module:
        """The module on torch's meta device, where nothing is computed and no memory taken; of a
        model that cannot be made there, with random weights. Errors as `make`."""
        try:
            with meta_device():
                return self.make(pretrained=False, seed=0, wanted=wanted)
        except ModelError as error:
            # What computes with tensors while it is made (torchvision's RegNets their widths).
            if isinstance(error.__cause__, NotImplementedError):
                return self.make(pretrained=False, seed=0, wanted=wanted)
            raise

    def converter(self, module: nn.Module) -> Callable[..., Any] | None:
        """The function that turns foreign and older weights into those of the module, called as
        `convert(state, module)`: what is called checkpoint_filter_fn beside the architecture of
        timm's that the module says it is, else beside its class."""
        import timm

        architecture = (getattr(module, "pretrained_cfg", None) or {}).get(
            "architecture", ""
        )
        own = [timm.model_entrypoint(architecture)] if timm.is_model(architecture) else []
        for made_by in (*own, type(module)):
            place = sys.modules.get(made_by.__module__)
            if callable(found := getattr(place, "checkpoint_filter_fn", None)):
                return found  # type: ignore[no-any-return]
        return None

    # ------------------------------------------------------------ what it says of itself

    @abstractmethod
    def transform(
        self,
        module: nn.Module,
        img_size: tuple[int, int] | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """input_size (channels, rows, cols), interpolation, crop_pct, crop_mode, mean, std.

        Args:
            module: as `make` gives it.
            img_size: (rows, cols) instead of its own.
            given: as many of them, and `fill`, in place of its own as are not None.

        Raises:
            ModelError: values that are none.
        """

    @abstractmethod
    def architecture(self, module: nn.Module) -> str:
        """A text that a store's identity compares: it is the same for equal sites."""

    def class_names(self, module: nn.Module) -> list[str] | None:
        """The names of the logits' classes, where they are known."""
        return None

    def pretrained_record(
        self, module: nn.Module, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        """`source` and `pretrained` of the model's own weights, and what of them was fitted; see
        `LoadedModel.weights`."""
        return {"source": "pretrained"}

    def assumed(self, module: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
        """The settings that neither a checkpoint's file nor its caller states, beside
        preprocessing."""
        return {}

    def origin(self) -> dict[str, Any]:
        """The entry of manifests about the source: `library` and its `version`, or the `sha256` of
        the file, and `notes`, what its user should know, each behind the name; {} for timm's, which
        every manifest has."""
        return {}


def drawn(seed: int, make: Any, what: str) -> nn.Module:
    """The module that `make()` builds under a seed.

    Raises:
        ModelError: in one line: `make` raises, or returns no module with parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make()
        except ModelError:
            raise
        except TypeError as error:
            raise ModelError(
                f"{what} does not take these arguments: {one_line(error)}"
            ) from error
        except Exception as error:
            raise ModelError(
                f"{what} cannot be made: {type(error).__name__}: {one_line(error)}"
            ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{what} gives {type(module).__name__}; expected a torch.nn.Module"
        )
    if next(module.parameters(), None) is None:
        raise ModelError(f"{what} gives a module without parameters; expected a network")
    return module


class Unfilled(TorchFunctionMode):
    """Leaves parameters as they are allocated, which costs neither time nor memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        written = (
            args[0] if args else given.get("tensor")
        )  # torch.nn.init passes it by name
        writes = (
            name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        )
        if writes and isinstance(written, nn.Parameter):
            return written
        return func(*args, **given)


@contextmanager
def quiet() -> Iterator[None]:
    """Context without a library's remarks (weights are random, as was asked for)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def one_line(error: BaseException) -> str:
    """The error's text without line breaks, cut where it is long; its type if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 3]}..."


def near_names(name: str, known: Sequence[str]) -> str:
    """`; near names: a, b` where some are known that resemble a name."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; near names: {', '.join(near)}" if near else ""


def foreign_place(name: str, where: str) -> ModelError:
    """The line for a model of a folder or a repository that a store's manifest names. where: the
    store's name."""
    return ModelError(
        f"{where} names the model {name[:80]}: a folder or a repository is not opened because a "
        "store names it; if the store is your own, repeat the command with --trust-store"
    )


def missing_extra(package: str, extra: str) -> ModelError:
    """The line for a library that an extra of vitsee's brings."""
    return ModelError(
        f"models of {package} need a package that is not installed (pip install 'vitsee[{extra}]')"
    )

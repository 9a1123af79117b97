"""Modules that take clips: batches of frames in order, (clips, frames, channels, rows, cols)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import FirstAttention
from vitsee_core.models.hook_points import ForwardEnded, ModelError, hooked, output_tensor

ATTRIBUTE = "_vitsee_frames"
Cells = tuple[int, int, int]  # of a grid: times, rows, columns
_STATED = ("patch_size", "tubelet_size")


def frames_of(module: nn.Module) -> int | None:
    """How many frames a module's clips have, None where it takes images."""
    return getattr(module, ATTRIBUTE, None)


def accept_clips(module: nn.Module, frames: int, *, channels_first: bool = False) -> None:
    """Mark a module as one of clips of so many frames. channels_first: it takes (clips, channels,
    frames, rows, cols) itself, and is given that from now on."""
    setattr(module, ATTRIBUTE, frames)
    if channels_first:

        def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not args or not isinstance(args[0], Tensor) or args[0].ndim != 5:
                return None
            return (args[0].transpose(1, 2), *args[1:]), kwargs

        module.register_forward_pre_hook(enter, with_kwargs=True)


def probe_clip(frames: int, size: tuple[int, int, int], n: int = 1) -> Tensor:
    """Random clips (n, frames, channels, rows, cols)."""
    return torch.randn((n, frames, *size), generator=torch.Generator().manual_seed(0))


def recognise(
    module: nn.Module, frames: int, size: tuple[int, int, int], name: str
) -> None:
    """Mark a user's own module as one of clips where it takes none but these, with the channels
    behind the frames or before them; leave one that takes images as it is.

    size: (channels, rows, cols) of a frame.

    Raises:
        ModelError: in one line: it takes neither images nor clips of this size.
    """
    device = next(module.parameters()).device
    clip = probe_clip(frames, size).to(device)
    if _runs(module, clip[0]) is None:
        return
    both = [_runs(module, clip), _runs(module, clip.transpose(1, 2))]
    if None not in both:
        raise ModelError(
            f"{name} takes neither images of {size[1]} x {size[2]} pixels nor clips of "
            f"{frames} frames of them: {both[0]}; expected a module that takes (clips, "
            "frames, channels, rows, cols) or (clips, channels, frames, rows, cols)"
        )
    accept_clips(module, frames, channels_first=both[0] is not None)


def _runs(module: nn.Module, x: Tensor) -> str | None:
    """None where a module takes a batch, else why not."""
    try:
        with torch.no_grad():
            module(x)
    except ForwardEnded:
        return None
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return None


def clip_cells(module: nn.Module, frames: int, size: tuple[int, int, int]) -> Cells:
    """Times, rows and columns of the tokens that a module makes of a clip: of the last map that a
    convolution gives before the first attention, else of the patches that it states.

    Raises:
        ModelError: neither is there, or the module does not take clips of this size.
    """
    found: list[Cells] = []

    def left(_: str, child: nn.Module, output: Any) -> None:
        weight = getattr(child, "weight", None)
        convolves = isinstance(weight, Tensor) and weight.ndim > 3
        x = output_tensor(child, output, 1) if convolves else None
        if x is not None and (cells := _of_map(tuple(x.shape), frames, size[1:])):
            found.append(cells)

    whole = (frames, *size[1:])
    given = probe_clip(frames, size).to(next(module.parameters()).device)
    hooks = hooked(module, lambda *_: None, left)
    with hooks, torch.no_grad(), FirstAttention():
        try:
            module(given)
        except ForwardEnded:
            pass
        except Exception as error:
            if _runs(module, given[0]) is None:
                raise ModelError(
                    "the model takes the frames of all clips in one batch of images; "
                    "expected one of (clips, frames, channels, rows, cols), or of images "
                    "with --frames"
                ) from error
            text = " ".join(str(error).split()).rstrip(".")
            raise ModelError(
                f"the model does not run on clips of {frames} frames of {size[1]} x "
                f"{size[2]} pixels: {text or type(error).__name__}; expected a size that "
                "it takes: try another --frames or --img-size"
            ) from error
    cells = found[-1] if found else _stated(module, whole)
    if cells is None:
        raise ModelError(
            "no convolution of the model gives a map of tokens of clips, and it states no "
            "patch_size; expected one of these"
        )
    if any(n % m for n, m in zip(whole, cells, strict=True)):
        raise ModelError(
            f"the model makes {cells[0]} x {cells[1]} x {cells[2]} tokens of {frames} "
            f"frames of {size[1]} x {size[2]} pixels, which they do not divide; expected "
            "another --frames or --img-size"
        )
    return cells


def _of_map(shape: tuple[int, ...], frames: int, size: tuple[int, int]) -> Cells | None:
    """The cells of a map of one clip (1, dim, times, rows, cols) or (times, dim, rows, cols)."""
    if len(shape) == 5 and shape[0] == 1:
        cells = shape[2:]
    elif len(shape) == 4:
        cells = shape[0], *shape[2:]
    else:
        return None
    smaller = 0 < cells[0] <= frames and 0 < cells[1] < size[0] and 0 < cells[2] < size[1]
    return (cells[0], cells[1], cells[2]) if smaller else None


def _stated(module: nn.Module, whole: tuple[int, ...]) -> Cells | None:
    """The cells by patches as the module, one below it or its configuration states them."""
    for child in module.modules():
        for stating in (child, getattr(child, "config", None)):
            patch, tubelet = (getattr(stating, name, None) for name in _STATED)
            sides = tuple(patch) if isinstance(patch, list | tuple) else (patch, patch)
            if isinstance(tubelet, list | tuple):  # all three in one (ViViT)
                tubelet, *sides_left = tubelet
                sides = tuple(sides_left) if len(sides_left) == 2 else sides
            steps = (1 if tubelet is None else tubelet, *sides[-2:])
            if all(isinstance(n, int) and n > 0 for n in steps) and not any(
                n % step for n, step in zip(whole, steps, strict=True)
            ):
                times, rows, cols = (n // s for n, s in zip(whole, steps, strict=True))
                return times, rows, cols
    return None

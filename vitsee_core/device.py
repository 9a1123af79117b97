"""Where and how precisely the model runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitsee_stores.errors import VitseeError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(text: str) -> torch.device:
    """The torch device for auto, cpu, cuda, cuda:i or mps; auto takes the first that exists.

    Raises:
        VitseeError: another word, or a device that this machine or torch build lacks.
    """
    has_mps = torch.backends.mps.is_available()
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", text)
    if match is None:
        raise VitseeError(f"--device is {text!r}; expected auto, cpu, cuda, cuda:1 or mps")
    kind, index = match[1], int(match[2] or 0)
    n_cuda = torch.cuda.device_count()
    if kind == "cuda" and index >= n_cuda:
        raise VitseeError(f"--device {text}: torch sees {n_cuda} CUDA devices here; try auto")
    if kind == "mps" and not has_mps:
        raise VitseeError("--device mps: torch sees no Metal device here; try auto")
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


def device_name(device: torch.device) -> str:
    """The device as people know it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def precision_context(device: torch.device, precision: str) -> Iterator[None]:
    """fp32 (no TF32 anywhere), tf32 (CUDA), or autocast to bf16 or fp16; flags are put back.

    Raises:
        VitseeError: tf32 on a device that is not CUDA.
    """
    if precision == "tf32" and device.type != "cuda":
        raise VitseeError(f"--precision tf32 exists on CUDA only; this run is on {device.type}")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(
            device.type, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST
        ):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before

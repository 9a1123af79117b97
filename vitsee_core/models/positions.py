"""The position embedding that a model adds to its tokens, found by its effect: a tensor whose
share in the tokens is the same for every image.

Which tensor it is, how it is resampled to the input size, and whether prefix tokens get a part of
it differs between architectures. So it is measured: the model's tokens with the tensor as it is,
minus its tokens with zeros in its place, where they first differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.perturbation import LEARNED, Candidate, PerturbationRunner
from vitsee_core.models.survey import tokens_of

SINE_COSINE = "sine-cosine"
_SINE_COSINE_TOLERANCE = 5e-3  # float16 checkpoints


@dataclass(frozen=True)
class Positions:
    """values: (rows, cols, dim) float32, what each patch gets, on the grid of the model's input.
    site: the name of the tensor, or of several that add up, or of the module that makes it.

    kind: "learned", "fixed" (a buffer), "sine-cosine" (a parameter with the values of that formula,
    so not learned) or "computed" (by a module).
    """

    site: str
    values: NDArray[np.float32]
    kind: str


def find_positions(model: LoadedModel) -> Positions | str:
    """The position embedding of the model's patches, or why it has none.

    The parts of prefix tokens are left out. Of several that are added at different depths it is
    the first. A float32 forward pass of two images, and for each tensor that may be it the part
    up to where it counts. Rounding: 1e-7 of the tokens' size.
    """
    channels, rows, cols = model.input_size
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(2, channels, rows, cols)
    images[1] = torch.randn(channels, rows, cols, generator=generator)
    runner = PerturbationRunner(model.module, images)
    found: dict[int, list[Candidate]] = {}
    refused: list[str] = []
    for candidate in runner.candidates():
        effect = runner.effect(candidate)
        if effect is None:
            continue
        call, change = effect
        if len(change) != 2 or not torch.allclose(change[0], change[1], rtol=0, atol=1e-3):
            continue  # not a sum, or seen only where attention has used it
        grid = _on_grid(change[0], model)
        if grid is not None and not grid.any():
            continue  # a class token or registers
        if grid is not None and _in_order(runner, call, grid.shape, model):
            found.setdefault(call, []).append(candidate)
        else:
            shape = " x ".join(map(str, change.shape[1:]))
            where = f"features ({shape}) that do not lie as in the image"
            refused.append(f"{candidate.name} is added to {where}")
    for call, chosen in sorted(found.items()):
        values = _on_grid(runner.share(chosen, call), model)
        if values is None or (values.any() and np.ptp(values, axis=(0, 1)).max() <= 1e-6):
            continue  # the same for every patch: positions within a patch
        kind = chosen[0].kind
        if kind == LEARNED and is_sine_cosine(values):
            kind = SINE_COSINE
        return Positions(" + ".join(c.name for c in chosen), values, kind)
    return refused[0] if refused else _why_none(model.module)


def is_sine_cosine(values: NDArray[np.floating[Any]]) -> bool:
    """Whether a table (rows, cols, dim) is the two-dimensional sine-cosine embedding of MAE and
    MoCo v3 (temperature 10,000), in any order of its channels.

    Products of its vectors are sums of cosines of the distances: sum_i cos(w_i dy) + cos(w_i dx),
    w_i = 10000^(-4 i / dim), i < dim / 4. A resampled table is not recognised.
    """
    rows, cols, dim = values.shape
    if dim % 4:
        return False
    waves = 10000.0 ** (-np.arange(dim // 4) / (dim // 4))
    down, across = (np.cos(np.multiply.outer(np.arange(n), waves)).sum(-1) for n in (rows, cols))
    lines = np.abs(np.subtract.outer(np.arange(rows), np.arange(rows)))
    columns = np.abs(np.subtract.outer(np.arange(cols), np.arange(cols)))
    wanted = down[lines][:, None, :, None] + across[columns][None, :, None, :]
    flat = values.reshape(-1, dim).astype(np.float64)
    found = (flat @ flat.T).reshape(rows, cols, rows, cols)
    return bool(np.abs(found - wanted).max() <= _SINE_COSINE_TOLERANCE * dim / 2)


def _on_grid(values: Tensor, model: LoadedModel) -> NDArray[np.float32] | None:
    """One image's features as (rows, cols, dim) without prefix tokens; None if they are no grid."""
    geometry = tokens_of(model.module, model.input_size)
    if values.ndim == 2:
        layout = geometry.token_layout(len(values))
        if layout is None or layout.grid is None:
            return None
        values = values[layout.n_prefix :].unflatten(0, layout.grid)
    elif values.ndim == 3:
        a, b, c = values.shape
        for fits in (geometry.exact, geometry.near):
            if fits((b, c)) != fits((a, b)):
                values = values.permute(1, 2, 0) if fits((b, c)) else values
                break
        else:
            return None
    else:
        return None
    return values.float().contiguous().numpy()


def _in_order(
    runner: PerturbationRunner, call: int, shape: tuple[int, ...], model: LoadedModel
) -> bool:
    """Whether what goes in at a call lies on the grid as in the image: a change in the top right
    patch and one in the bottom left patch are seen most in those quarters."""
    channels, height, width = model.input_size
    rows, cols = shape[:2]
    down, across = max(height // rows, 1), max(width // cols, 1)
    images = torch.zeros(2, channels, height, width)
    before = runner.entering(call, images)
    noise = torch.randn(channels, down, across, generator=torch.Generator().manual_seed(1))
    images[0, :, :down, -across:] = noise
    images[1, :, -down:, :across] = noise
    change = runner.entering(call, images) - before
    for part, top in zip(change, (True, False), strict=True):
        grid = _on_grid(part, model)
        if grid is None or not grid.any():
            return False
        row, col = np.unravel_index(np.abs(grid).sum(-1).argmax(), shape[:2])
        if (rows > 1 and (row < rows / 2) != top) or (cols > 1 and (col < cols / 2) == top):
            return False
    return True


def _why_none(module: nn.Module) -> str:
    none = "no position embedding is added to its features"
    for name, child in module.named_modules():
        if "rotary" in type(child).__name__.lower():
            return f"{none}: its attention turns queries and keys by position ({name})"
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    for word in ("relative_position", "rel_pos", "attention_bias"):
        for name in tensors:
            if word in name:
                return f"{none}: its attention has relative position biases ({name})"
    return none

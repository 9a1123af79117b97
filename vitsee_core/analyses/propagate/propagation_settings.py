"""Settings of propagation, and published ones by name.

They stand apart from `propagation`, which imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vitsee_stores.errors import VitseeError

WINDOWS = ("square", "circle")
SEEDS = ("nearest", "area")
UPSAMPLES = ("bilinear", "nearest")


@dataclass(frozen=True)
class PropagationSettings:
    """The choices by which labels are carried; `propagation` has the formula.

    Attributes:
        context: how many of the last frames count beside the first.
        radius: radius of the window in tokens.
        radius_px: the same in input pixels, instead of `radius`; both None: no window.
        neighbourhood: `square` (|dy| and |dx| up to the radius) or `circle`.
        topk: how many of the most similar tokens count; more if they tie.
        temperature: divides the cosines; the smaller, the more the nearest token counts.
        first_labels: how the first mask becomes labels of tokens, `nearest` (the pixel in the
            middle; small objects vanish) or `area` (shares).
        upsample: how these become pixels, `bilinear` or `nearest`.
    """

    context: int = 7
    radius: float | None = 12.0
    radius_px: float | None = None
    neighbourhood: str = "square"
    topk: int = 5
    temperature: float = 0.1
    first_labels: str = "nearest"
    upsample: str = "bilinear"

    def radii(self, stride_px: tuple[float, float]) -> tuple[float, float] | None:
        """Return the window's radius in rows and in columns of a grid; None for no window.

        stride_px: input pixels from one token to the next, down and across.
        """
        if self.radius_px is not None:
            return self.radius_px / stride_px[0], self.radius_px / stride_px[1]
        return None if self.radius is None else (self.radius, self.radius)

    def max_window_tokens(self, stride_px: tuple[float, float]) -> float:
        """Return the largest number of tokens in a window, over all its frames.

        Of a circle this is its square.
        """
        radii = self.radii(stride_px)
        if radii is None:
            return math.inf
        rows = 2 * int(radii[0]) + 1
        cols = 2 * int(radii[1]) + 1
        return rows * cols * (self.context + 1)


@dataclass(frozen=True)
class PropagationPreset:
    """A published setting.

    Attributes:
        settings: how labels are carried.
        sites: the sites whose tokens are used by default.
        source: publication and layer, in words.
    """

    settings: PropagationSettings
    sites: tuple[str, ...]
    source: str


PRESETS = {
    "walmer": PropagationPreset(
        PropagationSettings(),
        ("blocks",),
        "Walmer et al. 2023, Figs. 10 left and 30, Table 4: the raw outputs of the blocks",
    ),
    "dino": PropagationPreset(
        PropagationSettings(),
        ("norm",),
        "Caron et al. 2021: the last block after the final norm; frames with a short "
        "side of 480, the long side a multiple of 64",
    ),
    "dinov3": PropagationPreset(
        PropagationSettings(temperature=0.2, neighbourhood="circle", upsample="nearest"),
        ("norm",),
        "Simeoni et al. 2025, notebook segmentation_tracking: frames with a short side "
        "of 960",
    ),
}


def choose_settings(preset: str | None, **options: Any) -> PropagationSettings:
    """Return the settings of a preset, overridden by options.

    Args:
        preset: its name; None for `walmer`.
        options: fields of `PropagationSettings`; None keeps the preset's, and a `radius`
            of `math.inf` means no window.

    Raises:
        VitseeError: an unknown preset or choice, or an invalid number.
    """
    if preset is not None and preset not in PRESETS:
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    base = PRESETS[preset or "walmer"].settings
    overrides = {name: value for name, value in options.items() if value is not None}
    settings = replace(base, **overrides)
    # A radius in pixels, or an infinite one, replaces the preset's radius in tokens.
    if settings.radius_px is not None or settings.radius == math.inf:
        settings = replace(settings, radius=None)
    choices = {"neighbourhood": WINDOWS, "first_labels": SEEDS, "upsample": UPSAMPLES}
    for name, values in choices.items():
        value = getattr(settings, name)
        if value not in values:
            raise VitseeError(f"no {name} {value!r}; expected {' or '.join(values)}")
    for name, minimum in (("context", 0), ("topk", 1)):
        value = getattr(settings, name)
        if value < minimum:
            raise VitseeError(f"{name} is {value}; expected at least {minimum}")
    for radius in (settings.radius, settings.radius_px):
        if radius is not None and not 0 <= radius < math.inf:
            raise VitseeError(f"the radius is {radius:g}; expected 0 or more")
    if not 0 < settings.temperature < math.inf:
        raise VitseeError(
            f"the temperature is {settings.temperature:g}; expected a number above 0"
        )
    return settings

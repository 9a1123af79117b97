"""Options of the analyses that train on some images and measure accuracy on others."""

from __future__ import annotations

from vitsee_core.runtime.options import Option

TESTS = Option("", default="none")
RANDOM_BASELINE = Option(
    "Add the rows of Gaussian features of the same shape.",
    "--baseline",
    choices=("random",),
    default="none",
)
PER_CLASS = Option("Add top1_class of each class.")
ALLOW_SHARED = Option("Go on where the same image trains and tests.  [default: refuse]")

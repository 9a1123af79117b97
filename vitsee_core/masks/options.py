"""Options of the analyses that take masks, and of segments in place of images."""

from __future__ import annotations

from vitsee_core.runtime.options import Option
from vitsee_stores.errors import VitseeError


def parse_void(text: str) -> str | int:
    """A pixel value, or `none`.

    Raises:
        VitseeError: neither of them.
    """
    if text == "none":
        return text
    if not text.isdigit():
        raise VitseeError(f"{text!r}; expected a pixel value like 255, or none")
    return int(text)


def objects(about: str = "", default: str | None = None) -> Option:
    """Masks of objects. about: what they add; default: what is done without them."""
    return Option(
        "A folder of PNG masks, whose paths or names are the images' but for the ending, or a COCO "
        f".json file{about}. Repeatable: splits of one data set.",
        "--masks",
        default=default,
    )


SEGMENTS = Option(
    "Take objects or parts in place of images, with their categories for labels: a COCO .json file "
    "(instances or panoptic), or a folder of PNG masks, named as the images are but for the "
    "ending, with one segment per value. Repeatable: splits of one data set.  [default: images and "
    "their labels]"
)
PANOPTIC = Option(
    "The PNG files of a panoptic .json file.",
    metavar="DIR",
    default="the folder beside it that is called as it is",
    only_with=("masks",),
)
BACKGROUND = Option(
    "Pixel value of PNG masks outside of objects.",
    metavar="VALUE",
    default="0",
    least=0,
    only_with=("masks",),
)
VOID = Option(
    "Pixel value of PNG masks to leave out, or none.",
    metavar="VALUE",
    default="255",
    parse=parse_void,
    only_with=("masks",),
)

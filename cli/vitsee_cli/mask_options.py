"""Options of the commands that take masks: of objects against attention, or of segments in place of
images."""

from __future__ import annotations

import functools
from typing import Any

import click

from vitsee_cli.options import apply
from vitsee_cli.values import parse_path
from vitsee_core.segments import WEIGHTS, Segmentation


def parse_void(text: str | int) -> str | int:
    """A pixel value, or `none`."""
    if text == "none" or isinstance(text, int):
        return text
    if not text.isdigit():
        raise click.BadParameter(f"{text!r}; expected a pixel value like 255, or none")
    return int(text)


background_option = click.option(
    "--background",
    metavar="VALUE",
    multiple=True,
    type=click.IntRange(min=0),
    show_default="0",
    help="Pixel value of PNG masks outside of objects. Repeatable.",
)

void_option = click.option(
    "--void",
    metavar="VALUE",
    type=parse_void,
    show_default="255",
    help="Pixel value of PNG masks to leave out, or none.",
)

panoptic_option = click.option(
    "--panoptic",
    metavar="DIR",
    type=parse_path,
    show_default="the folder beside it that is called as it is",
    help="The PNG files of a panoptic .json file.",
)

_OF_SEGMENTS = (
    click.option(
        "--masks",
        metavar="PATH",
        type=parse_path,
        multiple=True,
        help="Take objects or parts in place of images, with their categories for labels: a COCO "
        ".json file (instances or panoptic), or a folder of PNG masks, named as the images are but "
        "for the ending, with one segment per value. Repeatable: splits of one data set.  "
        "[default: images and their labels]",
    ),
    panoptic_option,
    background_option,
    void_option,
    click.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        show_default="area",
        help="How much each patch counts for a segment: by the area in its cell, all that it "
        "touches alike, or as in the code of Walmer et al. (bicubic).",
    ),
    click.option(
        "--crowd/--no-crowd",
        default=None,
        show_default="no-crowd",
        help="Whether crowds (iscrowd 1) are segments.",
    ),
    click.option(
        "--segments",
        metavar="N",
        type=click.IntRange(min=1),
        show_default="all",
        help="At most N segments, those of images drawn with the seed.",
    ),
)


def segment_options(command: Any) -> Any:
    """--masks and what goes with it, together as `masks`: a Segmentation, or None without it."""

    @functools.wraps(command)
    def gathered(
        *args: Any,
        masks: tuple[Any, ...],
        panoptic: Any,
        background: tuple[int, ...],
        void: Any,
        weights: Any,
        crowd: Any,
        segments: Any,
        **kwargs: Any,
    ) -> Any:
        given = {
            **{"--panoptic": panoptic, "--background": background or None, "--void": void},
            **{"--weights": weights, "--crowd": crowd, "--segments": segments},
        }
        alone = [name for name, value in given.items() if value is not None]
        if alone and not masks:
            raise click.UsageError(f"{' and '.join(alone)} are of segments: give --masks PATH too")
        choice = None
        if masks:
            choice = Segmentation(masks, panoptic, background, void, weights, crowd, segments)
        return command(*args, masks=choice, **kwargs)

    return apply(gathered, _OF_SEGMENTS)

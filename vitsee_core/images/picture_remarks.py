"""Changes of images that are not plain RGB before a model sees them, for a remark with the
count of each at the end of a run; and EXIF orientation, by which cameras say how they were held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from PIL import Image

from vitsee_stores.plan import Size

_ORIENTATION = 0x0112  # tags of EXIF, and of TIFF
_WIDTH = 0x0100
_LENGTH = 0x0101
# The turn that brings a picture of each orientation upright; of 1 none.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset((5, 6, 7, 8))  # height becomes width

EXIF_IGNORED = "exif ignored"
EXIF_APPLIED = "exif applied"
ALPHA = "alpha"
FRAMES = "frames"
SIXTEEN_BITS = "16 bits"
CMYK = "CMYK"
WARNED = "warned"
_DONE = {
    EXIF_IGNORED: "an EXIF orientation, which was not applied (--exif turns them upright)",
    EXIF_APPLIED: "an EXIF orientation and were turned upright",
    ALPHA: "an alpha channel, which was dropped",
    FRAMES: "several frames or pages, of which the first was taken",
    SIXTEEN_BITS: "16 bits a channel, which became 8",
    CMYK: "CMYK colours, converted to RGB without a profile",
}
_MESSAGES_SHOWN = 3
_MESSAGE_LENGTH = 100

# Under this name in what Pillow keeps beside an image's pixels, which cropping and turning keep.
_KEY = "vitsee_remarks"


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1, upright, of an image that says none or one that is none, and
    of TIFF, which Pillow turns itself."""
    if image.format == "TIFF":
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged metadata, on which Pillow raises nearly anything
        return 1
    return orientation if orientation in _TURNS else 1


def turned_upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image as its orientation says that it was held."""
    if orientation not in _TURNS:
        return image
    turned = image.transpose(_TURNS[orientation])
    turned.format = image.format
    return turned


def size_when_loaded(image: Image.Image, exif: bool) -> Size:
    """(height, width) that an image, opened and not yet loaded, will have; exif: whether it is
    turned upright then."""
    if image.format == "TIFF":
        # Always turned by Pillow, whose older versions have the other size until they load it.
        tags = image.tag_v2  # type: ignore[attr-defined]
        size = int(tags[_LENGTH]), int(tags[_WIDTH])
        return _size_upright(size, tags.get(_ORIENTATION, 1))
    size = image.height, image.width
    if exif:
        return _size_upright(size, orientation_of(image))
    return size


def _size_upright(size: Size, orientation: int) -> Size:
    height, width = size
    if orientation in _SIDEWAYS:
        return (width, height)
    return (height, width)


def has_wide_channels(image: Image.Image) -> bool:
    """Whether an image that is opened and not yet loaded has 16 bits a channel."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return True
    for tile in getattr(image, "tile", ()):
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(isinstance(value, str) and ";16" in value for value in arguments):
            return True
        if image.format == "PPM" and any(
            isinstance(value, int) and value > 255 for value in arguments
        ):
            return True
    return False


def describe_loaded(image: Image.Image) -> list[str]:
    """Return the changes of a loaded image on its way to RGB, as keys of remarks."""
    done = []
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        done.append(ALPHA)
    if image.mode == "CMYK":
        done.append(CMYK)
    try:
        several = bool(getattr(image, "is_animated", False))
    except Exception:  # damaged frames behind the first, which is what is used
        several = False
    if several:
        done.append(FRAMES)
    return done


def keep_remarks(image: Image.Image, remarks: Collection[str]) -> None:
    """Lay the remarks beside the image's pixels."""
    image.info[_KEY] = tuple(dict.fromkeys(remarks))


def keep_clip_remarks(clip: Any, remarks: Collection[str]) -> None:
    """Add the remarks on a frame to those of its clip."""
    vars(clip)[_KEY] = tuple(dict.fromkeys((*remarks_on(clip), *remarks)))


def remarks_on(image: Any) -> tuple[str, ...]:
    """Return the remarks that `keep_remarks`, or a clip's loader, attached to an image."""
    about = image.info if isinstance(image, Image.Image) else vars(image)
    remarks: tuple[str, ...] = tuple(about.get(_KEY, ()))
    return remarks


def warned(messages: Collection[str]) -> list[str]:
    """The remarks for what Pillow warned about while it read one image."""
    texts = [" ".join(message.split())[:_MESSAGE_LENGTH] for message in messages]
    if texts:
        return [WARNED, *(f"{WARNED}: {text}" for text in texts)]
    return []


def remark_lines(counts: Mapping[str, int], total: str) -> list[str]:
    """A line for each kind of remark. total: `12 images`, of which they are."""
    lines = []
    for key, text in _DONE.items():
        if key in counts:
            lines.append(f"{counts[key]} of {total} have {text}")
    if WARNED in counts:
        messages = {
            key.removeprefix(f"{WARNED}: "): n
            for key, n in counts.items()
            if key.startswith(f"{WARNED}: ")
        }
        common = sorted(messages, key=lambda message: (-messages[message], message))
        shown = "; ".join(common[:_MESSAGES_SHOWN])
        if len(common) > _MESSAGES_SHOWN:
            shown += f"; and {len(common) - _MESSAGES_SHOWN} others"
        lines.append(
            f"{counts[WARNED]} of {total} made Pillow warn, and were read: {shown}"
        )
    return lines

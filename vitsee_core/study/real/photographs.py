"""Sixteen photographs that lie in the wheels of scikit-image and scikit-learn.

Their licences are those that the packages state: scikit-image in the docstrings of `skimage.data`,
scikit-learn in `sklearn/datasets/images/README.txt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from vitsee_core.study.real.packages import Package, downloaded, read_checked

SKIMAGE = Package("scikit-image", "0.26.0", 13_711_217, "CC0 and public domain")
CREDITS = "LICENCES.txt"


class Photograph(NamedTuple):
    """A file of a package.

    Attributes:
        file: its name.
        sha256: its hash, which is checked: the wheel may be one of several.
        licence: with the author where there is one to be named.
    """

    file: str
    sha256: str
    licence: str


OF_SKIMAGE = (
    Photograph(
        "astronaut.png",
        "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
        "public domain, NASA",
    ),
    Photograph(
        "brick.png",
        "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
        "CC0, CC0Textures",
    ),
    Photograph(
        "camera.png",
        "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a",
        "CC0, Lav Varshney",
    ),
    Photograph(
        "cell.png",
        "8d23a7fb81f7cc877cd09f330357fc7f595651306e84e17252f6e0a1b3f61515",
        "CC0, Paul Müller and others",
    ),
    Photograph(
        "chelsea.png",
        "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
        "CC0, Stefan van der Walt",
    ),
    Photograph(
        "clock_motion.png",
        "f029226b28b642e80113d86622e9b215ee067a0966feaf5e60604a1e05733955",
        "public domain, Stefan van der Walt",
    ),
    Photograph(
        "coffee.png",
        "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
        "CC0, Rachel Michetti",
    ),
    Photograph(
        "grass.png",
        "b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89",
        "CC0, linolafett",
    ),
    Photograph(
        "gravel.png",
        "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12",
        "CC0, CC0Textures",
    ),
    Photograph(
        "hubble_deep_field.jpg",
        "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4",
        "public domain, NASA",
    ),
    Photograph(
        "microaneurysms.png",
        "a1e1be59aa447f8ce082f7fa809997ab369a2b137cb6c4202abc647c7ccf6456",
        "CC0, Andreas Maier",
    ),
    Photograph(
        "retina.jpg",
        "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6",
        "CC0, Mikael Häggström",
    ),
    Photograph(
        "rocket.jpg",
        "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
        "public domain, SpaceX",
    ),
    Photograph(
        "text.png",
        "bd84aa3a6e3c9887850d45d606c96b2e59433fbef50338570b63c319e668e6d1",
        "public domain, Wikipedia",
    ),
)
OF_SKLEARN = (
    Photograph(
        "china.jpg",
        "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
        "CC BY 2.0, danielbuechele (flickr.com/photos/danielbuechele/6061409035)",
    ),
    Photograph(
        "flower.jpg",
        "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
        "CC BY 2.0, vultilion (flickr.com/photos/vultilion/6056698931)",
    ),
)
PHOTOGRAPHS = (*OF_SKIMAGE, *OF_SKLEARN)


def photographs() -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the photographs, each as its package has it, and of a list of
    their licences.

    Raises:
        VitseeError: scikit-image could not be downloaded, or a file is another than the pinned one.
    """
    with downloaded(SKIMAGE) as wheel:
        for photograph in OF_SKIMAGE:
            data = wheel.read(f"skimage/data/{photograph.file}")
            name = f"{photograph.file} of {SKIMAGE}"
            yield photograph.file, read_checked(data, photograph.sha256, name)
    # scikit-learn is installed: vitsee needs it.
    folder = resources.files("sklearn.datasets").joinpath("images")
    for photograph in OF_SKLEARN:
        data = folder.joinpath(photograph.file).read_bytes()
        name = f"{photograph.file} of scikit-learn"
        yield photograph.file, read_checked(data, photograph.sha256, name)
    lines = [f"{photograph.file}: {photograph.licence}" for photograph in PHOTOGRAPHS]
    yield CREDITS, "\n".join([*lines, ""]).encode()

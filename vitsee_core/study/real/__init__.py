"""Models of real size, and photographs, out of PyPI's packages, for `vitsee demo --real`."""

from vitsee_core.study.real.making import PHOTOS as PHOTOS
from vitsee_core.study.real.making import make as make
from vitsee_core.study.real.making import missing as missing

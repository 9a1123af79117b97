"""Class maps: the class of every pixel, in the files that the authors of data sets distribute."""

from vitsee_core.masks.class_maps.maps import IGNORED, ClassMap, ClassMaps
from vitsee_core.masks.class_maps.opening import open_class_maps

__all__ = ["IGNORED", "ClassMap", "ClassMaps", "open_class_maps"]

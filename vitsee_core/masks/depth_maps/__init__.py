"""Depth maps: the depth of every pixel in metres, in the files that authors distribute."""

from vitsee_core.masks.depth_maps.maps import MIN_DEPTH, DepthMap, DepthMaps, open_depth_maps

__all__ = ["MIN_DEPTH", "DepthMap", "DepthMaps", "open_depth_maps"]

"""Semantic keypoints: pairs of images, where a keypoint of one lies in the other, and the share
that is found."""

"""Ground truth of images: labels of whole images, and masks of objects and parts."""

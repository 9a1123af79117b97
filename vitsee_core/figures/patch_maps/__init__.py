"""Patch tokens as maps beside photographs: positions of cells on images, colours, pictures."""

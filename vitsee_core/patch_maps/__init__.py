"""Patch tokens as maps beside photographs: where cells lie on images, colours, pictures."""

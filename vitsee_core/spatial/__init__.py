"""How the patch tokens of an image lie in space: cosines, frequencies, shares of variance."""

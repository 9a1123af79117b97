"""Second moments of features, by block of images, and the spectra that follow from them."""

"""Second moments of features, by block of images, and spectra derived from them."""

"""The science of vitsee: models, images, extraction and analyses; usable without a terminal."""

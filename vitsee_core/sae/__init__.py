"""Dictionaries: codes of tokens by the encoders of sparse autoencoders and concept methods."""

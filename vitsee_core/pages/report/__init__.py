"""One page from a folder of results and stores, for a browser and without a network."""

"""Linear probes: which images train and test them, what they see of a site, how they are scored."""

"""The terminal of vitsee: parse, open, call, print."""

"""The parts that pages for a browser share: style, modules of script, and how these get into one
file."""

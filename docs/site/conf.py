"""Sphinx on the source that tools/docs_source.py assembles; nothing is loaded from a network."""

project = "vitsee"
author = "the vitsee authors"
copyright = author
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "vitsee"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]

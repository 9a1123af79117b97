"""One thin command a file: `attn_dist.py` holds `vitsee attn-dist` as `command`.

Nothing registers it. `vitsee --help` imports every file: heavy imports belong into the functions.
"""

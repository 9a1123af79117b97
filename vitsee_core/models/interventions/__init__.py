"""Interventions: tokens replaced, heads ablated, attention blocked while a model runs. The options'
grammar is intervention_spec beside this room.

replacements  which tokens of a site, and the values or neurons from a store of the unchanged model
changes       the hooks, attention without blocked keys, and the proof on the first images
switching     options and a model's site table -> hooks
"""

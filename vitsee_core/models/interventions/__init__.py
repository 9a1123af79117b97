"""Interventions: tokens replaced, heads ablated, attention blocked while a model runs. The
options' grammar is intervention_spec beside this room.

tokens      which tokens of a site
references  the values that replace them, from a store of the unchanged model
neurons     which neurons move their activations to added registers
blocked     which keys a query must not attend to, and the mask that sees to it
changes     the hooks
switching   options and a model's site table -> hooks
proof       whether these do what they say, on the first images
"""

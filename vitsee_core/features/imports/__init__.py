"""Stores of vectors and tokens that others computed: neural responses, features of other tools."""

from vitsee_core.features.imports.stores import import_arrays as import_arrays

__all__ = ["import_arrays"]

"""Findings of papers, as numbers with intervals that are above 0 where a finding holds."""

"""The findings of the papers, each as a number above 0 if it holds.

Which third, half or quarter of the layers is meant, and which models are compared, is defined here
and was chosen from the papers' text and not from the numbers.
"""

from dataclasses import replace

from vitsee_core.study.findings import attention, interventions, similarity, skips, training

SECTIONS = (similarity, attention, skips, training, interventions)
FINDINGS = tuple(
    replace(finding, section=part.SECTION) for part in SECTIONS for finding in part.FINDINGS
)

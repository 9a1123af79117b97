"""The findings of the papers, each as a number above 0 if it holds.

Which third, half or quarter of the layers is meant, and which models are compared, is defined here
and was chosen from the papers' text and not from the numbers.
"""

from vitsee_core.findings import attention, interventions, similarity, skips, training

FINDINGS = (
    *similarity.FINDINGS,
    *attention.FINDINGS,
    *skips.FINDINGS,
    *training.FINDINGS,
    *interventions.FINDINGS,
)

"""The findings of the papers that docs/findings.md looks for, each as a number above 0 if it holds.

Which third, half or quarter of the layers is meant, and which models are compared, is said here and
was chosen from the papers' text and not from the numbers.
"""

from papers import attention, similarity, skips, training
from papers.finding import Finding as Finding
from papers.finding import verdict as verdict

FINDINGS = (
    *similarity.FINDINGS,
    *attention.FINDINGS,
    *skips.FINDINGS,
    *training.FINDINGS,
)

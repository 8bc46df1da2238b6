"""Two arms of a split side by side: is there a difference, and how sure is it? Pure.

distributions   what the intervals are computed by
samples         values as they were seen, or only how many lay in each bucket
intervals       a figure, a difference, and how far they may be off
evidence        what a source shows of the arms of a model
logs            that, from an access log
pages           that, from a page of metrics
comparison      both arms, figure by figure
report          how it is told
"""

from gateway.tools.ab.comparison import Comparison, Mismatch, choose, compare, ratio
from gateway.tools.ab.evidence import Asked, Evidence
from gateway.tools.ab.logs import read_log
from gateway.tools.ab.pages import Unreadable, is_page, read_page
from gateway.tools.ab.report import Report, apart, report

__all__ = [
    "Asked",
    "Comparison",
    "Evidence",
    "Mismatch",
    "Report",
    "Unreadable",
    "apart",
    "choose",
    "compare",
    "is_page",
    "ratio",
    "read_log",
    "read_page",
    "report",
]

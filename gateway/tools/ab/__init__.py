"""Compare two versions of a traffic split: is there a difference, and how certain is it? Pure.

statistics   samples, distributions and intervals
sources      what usage rows, an access log or a page of metrics say of the versions of a model
comparison   two versions, number by number, and the report
experiments  all traffic splits of a configuration, for the admin listener
"""

from gateway.tools.ab.comparison import ComparisonError, build_report, describe_excluded
from gateway.tools.ab.sources import UsageQuery

__all__ = ["ComparisonError", "UsageQuery", "build_report", "describe_excluded"]

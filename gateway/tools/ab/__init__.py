"""Compare two versions of a traffic split: is there a difference, and how certain is it? Pure.

statistics   samples, distributions and intervals
sources      what an access log or a page of metrics says of the versions of a model
comparison   two versions, number by number, and the report
"""

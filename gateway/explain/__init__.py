"""Explanations: why a request went where it went.

recorder           records the steps of a request while it is served
explanation_store  keeps the last 100 explanations
dry_run            runs a request up to the point where it would be sent, and sends nothing
sample_requests    requests for dry runs, completed from what is given
parts              the parts of an explanation
report             the Structs of an explanation
report_text        its text form
"""

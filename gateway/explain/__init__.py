"""Explanations: why a request went where it went.

recorder  records the steps of a request while it is served; keeps the last 100 explanations
dry_run   runs a request up to the point where it would be sent, and sends nothing
report    the Structs of an explanation, and their text form
"""

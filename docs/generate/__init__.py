"""Generates the reference pages from the code: ``python -m docs.generate docs/reference``.

protocols      parameters of each protocol, what workers support of them, and errors
configuration  every field of the configuration
commands       the command line, and the metrics
markdown       tables and other bits of Markdown
"""

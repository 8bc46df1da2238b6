"""Probes of a worker, in whatever dialect it speaks: what it does of all that it may be asked.

line        asks a worker as a pool would, and tells all that was heard
probing     what a probe is, how it is run, and what was found
ideal       what the dialect has a place for
probes      all of them; each topic has a module
found       what was found, for people, programs and a pool
"""

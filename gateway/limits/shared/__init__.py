"""Limits that several gateways share: what is left of them is kept by a Redis.

store     asks it, within a time that is known beforehand, or not at all
lend.lua  what it does there, as one step
counts    how that goes, for Prometheus
"""

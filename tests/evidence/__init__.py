"""Simulations of the statistics, and the page of their results: ``make evidence``."""

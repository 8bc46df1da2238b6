"""What is kept of exchanges that are over. It is written by threads, and no answer waits for it.

scribe   a thread that writes what it is given
lines    the log, on standard error
ledger   the rows of usage, in SQLite
postgres the same in a database of PostgreSQL
sums     what these come to
lost     what could not be written, counted for Prometheus
"""

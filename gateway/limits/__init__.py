"""How much each key may ask for: requests, tokens, so many at a time, and tokens in a day.

counters   what is counted, one limit each     estimate   the tokens that a request may take
allowance  what a key may take                 accounts   what is used, whatever the configuration
limiter    whether a request may be served     counts     what came of it, for Prometheus
ports      who lends what several share        lent       what is counted of that
leasing    asks for more of it                 shared     a Redis that lends
"""

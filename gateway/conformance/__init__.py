"""What a dialect's reference promises, as cases: one request and its answer a row.

cases       what a case is, and how it is played against whatever serves at a URL
<dialect>   that dialect's cases, ``CASES``: data, and the few checks that data can't say
"""

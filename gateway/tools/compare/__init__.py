"""``interlingua compare``: two recordings, request by request and as a whole.

observation  what is measured of one recorded request
comparison   the measures of both sides, which differ, and with what certainty
text         the report's words and numbers
page         the report as one HTML page
embeddings   the similarity of texts by a local embedding model
"""

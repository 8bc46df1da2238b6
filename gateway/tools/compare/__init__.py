"""How ``interlingua compare`` shows two recordings; ``gateway.evidence.recordings`` compares them.

text         the report's words and numbers
page         the report as one HTML page
embeddings   the similarity of texts by a local embedding model
"""

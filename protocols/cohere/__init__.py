"""Cohere's API v2, towards clients and towards workers: chat and rerank.

endpoints    what clients call: paths, the adapter, the list of models
params       parameter tables and the values of enumerations
requests     client JSON to the internal request: conversations with documents, tools
responses    events to responses, unary and streaming
errors       error bodies, and the end of a stream that failed
upstream     requests to workers, and pass-through
decoder      responses of workers
openapi      schemas of requests and responses

Sources: Cohere's OpenAPI document (cohere-ai/cohere-developer-experience, cohere-openapi.yaml of
2026-08-20), its guides of chat, streaming, tool use and retrieval, and the types of cohere (Python)
7.3. ``docs/howto/cohere.md`` says what clients may expect.
"""

from protocols.cohere.endpoints import Cohere

__all__ = ["Cohere"]

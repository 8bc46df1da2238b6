"""Ollama's API, towards clients only.

endpoints  paths, model names, listings; the adapter
params     options and the other scalar parameters
requests   chat, generate and embeddings requests
responses  responses: JSON, and streams of JSON lines
errors     our errors in Ollama's texts
openapi    schemas of requests and responses
"""

from protocols.ollama.endpoints import Ollama

__all__ = ["Ollama"]

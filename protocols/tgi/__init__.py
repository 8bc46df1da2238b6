"""Hugging Face's Text Generation Inference.

endpoints  paths, what is read of a body for routing; the adapter
params     parameter tables
requests   requests of clients: /generate, and chat and completions with TGI's own fields
responses  responses to clients: JSON, and streams of tokens
errors     our errors in TGI's form; worker errors, unary and in streams
upstream   the upstream adapter; requests for /generate and /v1/chat/completions
decoder    responses of workers to prompts
openapi    schemas of requests and responses
"""

from protocols.tgi.endpoints import TGI

__all__ = ["TGI"]

"""Anthropic's Messages API, towards clients and towards workers.

endpoints    what clients call: routes, the adapter, the list of models, token counts
params       parameter table, limits and error texts
requests     client JSON to the internal request
responses    events to messages, unary and streaming
errors       error bodies, and errors of workers
upstream     requests to workers, and pass-through
decoder      responses of workers
openapi      schemas of requests and responses
"""

from protocols.anthropic.endpoints import Anthropic

__all__ = ["Anthropic"]

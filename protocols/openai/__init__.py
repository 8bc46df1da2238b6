"""OpenAI's API, towards clients and towards workers.

endpoints    what clients call: routes, the adapter, rate limit headers, the list of models
upstream     pass-through rules

What its kin share with it is in ``protocols.chat``.
"""

from protocols.openai.endpoints import OpenAI

__all__ = ["OpenAI"]

"""A gateway between the clients and the workers of language models.

Clients speak many wire protocols, and so do workers. The gateway understands each of them into
one internal request, routes it, and answers in the caller's own words.

Read ``core`` for the vocabulary, ``app`` for how the parts are put together and ``server`` for the
life of one exchange. This file imports nothing, so that ``protocols.core`` may lie below
``protocols`` and ``backends`` although ``gateway.runtime.gateway`` lies above them.
"""

__version__ = "0.1.0"

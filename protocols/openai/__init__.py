"""OpenAI's API, towards clients and towards workers; and the pieces from which its kin are built.

``dialect`` puts the rest together. From client to worker: ``requests`` reads with ``tables``,
``messages`` and ``tools``; ``worker`` writes by ``profiles``, for lesser workers after a
``narrowing``. And back: ``decoder`` reads what ``incoming`` describes; ``answers`` writes in a
``style``. What needs no translation goes by ``relay`` and comes back by ``passage``. ``errors``
refuses clients, ``faults`` understands workers' errors.
"""

from protocols.openai.endpoints import OpenAI

__all__ = ["OpenAI"]

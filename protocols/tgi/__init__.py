"""Hugging Face's Text Generation Inference, towards workers only.

upstream   the adapter; parameter tables; requests for /generate and /v1/chat/completions
decoder    responses to prompts
errors     worker errors, unary and in streams
"""

from protocols.tgi.upstream import TGI

__all__ = ["TGI"]

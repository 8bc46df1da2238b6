"""Hugging Face's Text Generation Inference, towards workers alone.

dialect    which of its APIs a request goes to, and what its servers tell of themselves
chat       conversations, in OpenAI's words: what of these it does not take, or takes otherwise
generate   prompts, in its own words
tables     the scalar parameters of both
decoder    the answers to prompts, which ``incoming`` describes
faults     its errors, and those of its streams
"""

from protocols.tgi.upstream import TGI

__all__ = ["TGI"]

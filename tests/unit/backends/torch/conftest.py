"""Fixtures of the tiny model."""

from tests.support.tiny_model import (
    driven,
    noisy,
    reference,
    scripted,
    tiny,
    tiny_folder,
    tokenizer,
)

__all__ = ["driven", "noisy", "reference", "scripted", "tiny", "tiny_folder", "tokenizer"]

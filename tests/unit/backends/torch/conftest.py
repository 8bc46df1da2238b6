"""Makes the fixtures of the tiny model available."""

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

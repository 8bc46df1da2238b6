"""Fixtures of the tiny model."""

from tests.support.tiny_model import driven, reference, scripted, tiny, tiny_folder, tokenizer

__all__ = ["driven", "reference", "scripted", "tiny", "tiny_folder", "tokenizer"]

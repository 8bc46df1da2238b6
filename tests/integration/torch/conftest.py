"""Makes the fixtures of the tiny model available."""

from tests.support.tiny_model import driven, reference, scripted, tiny, tiny_folder, tokenizer

__all__ = ["driven", "reference", "scripted", "tiny", "tiny_folder", "tokenizer"]

"""How many tokens a request may take, as far as its bytes tell it without being decoded.

A guess, and no more: what it took is known at its end, and then counted.
"""

import re
from typing import Final

from protocols.core.catalog import ModelInfo

BYTES_PER_TOKEN: Final = 4
"""Of JSON in English; other languages and escapes take more bytes for a token."""
MAX_ESTIMATED_PROMPT: Final = 32_768
"""In tokens, where the model's context is not known: a picture's bytes are no prompt."""
DEFAULT_COMPLETION_TOKENS: Final = 256
"""In tokens, where neither the client nor the model says how long an answer may be."""
_MAX_TOKENS_PATTERN: Final = re.compile(
    rb'"max_(?:[a-z]{1,10}_)?tokens"\s{0,9}:\s{0,9}([0-9]{1,9})'
)
"""Every dialect has a field of such a name. A text's own quotes are escaped, so that none fits."""


def estimate_tokens(body: bytes, model: ModelInfo) -> tuple[int, int]:
    """The tokens of the prompt, and those of the answer."""
    prompt = min(len(body) // BYTES_PER_TOKEN, model.context_length or MAX_ESTIMATED_PROMPT)
    if model.task == "embedding":
        return prompt, 0
    said = _MAX_TOKENS_PATTERN.search(body)
    return prompt, (model.max_tokens or DEFAULT_COMPLETION_TOKENS) if said is None else int(said[1])

"""A forward pass, a tokenizer and a reader, made one model."""

from typing import Any, NamedTuple

from transformers import AutoTokenizer

from backends.torch.forward import Forward, load_forward
from backends.torch.loading import load
from backends.torch.models import Found
from backends.torch.reading import Reader
from backends.torch.templates import template_at


class Model(NamedTuple):
    """A model with all that belongs to it. ``ends`` are the tokens with which it ends."""

    runner: Forward
    tokenizer: Any
    input_processor: Reader
    end_tokens: frozenset[int]


def end_tokens(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """The tokens with which the model ends, from its tokenizer and its configurations."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, *(getattr(c, "eos_token_id", None) for c in configs)):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)


def load_model(
    found: Found, device: str, dtype: str, context: int | None, template: str | None = None
) -> Model:
    """The model of a folder or hub name, with its tokenizer and its own defaults."""
    forward = load_forward(found, device, dtype, context)
    tokenizer = load(AutoTokenizer, found)
    if template is not None:
        tokenizer.chat_template = template_at(template)
    return assemble(forward, tokenizer)


def assemble(forward: Forward, tokenizer: Any) -> Model:
    """A forward and a tokenizer, made one."""
    own = forward.generation_config
    defaults = {}
    if getattr(own, "do_sample", False):
        defaults = {name: getattr(own, name, None) for name in ("temperature", "top_p", "top_k")}
    reader = Reader(
        tokenizer,
        context=forward.context_length,
        vocabulary=forward.vocabulary_size,
        defaults=defaults,
    )
    return Model(forward, tokenizer, reader, end_tokens(tokenizer, forward.config, own))

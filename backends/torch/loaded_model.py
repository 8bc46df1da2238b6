"""A loaded model: forward pass, tokenizer and input processor."""

from typing import Any, NamedTuple

from transformers import AutoTokenizer

from backends.torch.loader import ModelLocation, load_pretrained, load_template
from backends.torch.model import ModelRunner, load_forward
from backends.torch.tokenization import InputProcessor


class LoadedModel(NamedTuple):
    """A model with its tokenizer. ``end_tokens``: the tokens that end a text."""

    runner: ModelRunner
    tokenizer: Any
    input_processor: InputProcessor
    end_tokens: frozenset[int]


def collect_end_tokens(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """The end tokens of the tokenizer and the configurations."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, *(getattr(c, "eos_token_id", None) for c in configs)):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)


def load_model(
    found: ModelLocation, device: str, dtype: str, context: int | None, template: str | None = None
) -> LoadedModel:
    """Load a model with its tokenizer and default sampling parameters."""
    forward = load_forward(found, device, dtype, context)
    tokenizer = load_pretrained(AutoTokenizer, found)
    if template is not None:
        tokenizer.chat_template = load_template(template)
    return assemble_model(forward, tokenizer)


def assemble_model(forward: ModelRunner, tokenizer: Any) -> LoadedModel:
    """Combine a forward pass and a tokenizer."""
    own = forward.generation_config
    defaults = {}
    if getattr(own, "do_sample", False):
        defaults = {name: getattr(own, name, None) for name in ("temperature", "top_p", "top_k")}
    reader = InputProcessor(
        tokenizer,
        context=forward.context_length,
        vocabulary=forward.vocabulary_size,
        defaults=defaults,
    )
    return LoadedModel(
        forward, tokenizer, reader, collect_end_tokens(tokenizer, forward.config, own)
    )

"""A loaded model: model runner, tokenizer and input processor."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
from transformers import AutoConfig, AutoTokenizer

from backends.torch.grammar_compiler import supports_grammars
from backends.torch.loader import ModelLocation, find_model, load_pretrained
from backends.torch.model import ModelRunner, compute_context_length, load_model_runner
from backends.torch.model_files import EngineTask, ModelError
from backends.torch.pooling import read_pooling_config
from backends.torch.response_template import get_response_template
from backends.torch.template_features import summarize_features
from backends.torch.tokenization import InputProcessor
from backends.torch.weight_summary import summarize_weights
from protocols.core.catalog import ModelFeatures, ModelWeights
from protocols.core.json_text import decode_json


class LoadedModel(NamedTuple):
    """A model with its tokenizer. ``end_tokens``: the tokens that end generation."""

    runner: ModelRunner
    tokenizer: Any
    input_processor: InputProcessor
    end_tokens: frozenset[int]


def collect_end_tokens(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """The end tokens of the tokenizer and the configurations."""
    tokens: set[int] = set()
    for value in (tokenizer.eos_token_id, *(getattr(c, "eos_token_id", None) for c in configs)):
        if isinstance(value, int):
            tokens.add(value)
        elif value is not None:
            tokens.update(value)
    return frozenset(tokens)


def load_model(
    location: ModelLocation,
    device: str,
    dtype: str,
    context: int | None,
    template: str | None = None,
    *,
    cache_bytes: int | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer and default sampling parameters.

    ``cache_bytes`` is the size of the KV cache, which limits the context.
    """
    runner = load_model_runner(location, device, dtype, context)
    if cache_bytes is not None:
        runner.limit_context(cache_bytes)
    tokenizer = load_pretrained(AutoTokenizer, location)
    if template is not None:
        tokenizer.chat_template = load_template(template)
    return assemble_model(runner, tokenizer)


def inspect_model(
    path: str, task: EngineTask | None, template: str | None, context: int | None
) -> ModelFeatures:
    """What is understood of a model, from its configuration and tokenizer. Raises ModelError."""
    location = find_model(path, logging.getLogger(__name__).info, task)
    if location.task != "generate":
        lengths = (read_pooling_config(Path(location.source)).max_length, context)
        context_length = min((one for one in lengths if one), default=None)
        return summarize_encoder(location, path, context_length)
    tokenizer = load_pretrained(AutoTokenizer, location)
    if template is not None:
        tokenizer.chat_template = load_template(template)
    config = load_pretrained(AutoConfig, location).get_text_config()
    length = compute_context_length(config, context)
    reader = InputProcessor(tokenizer, context=length, vocabulary=1, defaults={})
    return summarize_model(
        tokenizer, reader, length, summarize_weights(path, Path(location.source))
    )


_ENCODER_TASKS: Final[Mapping[EngineTask, Literal["embedding", "rerank", "classify"]]] = {
    "embed": "embedding", "rerank": "rerank", "classify": "classify",
}  # fmt: skip


def summarize_encoder(
    location: ModelLocation, path: str, context_length: int | None
) -> ModelFeatures:
    """What is known of the model at ``path`` that generates no text."""
    return ModelFeatures(
        task=_ENCODER_TASKS[location.task],
        context_length=context_length,
        weights=summarize_weights(path, Path(location.source)),
    )


def summarize_model(
    tokenizer: Any,
    input_processor: InputProcessor,
    context_length: int,
    weights: ModelWeights | None,
) -> ModelFeatures:
    """What is understood of a model that generates text."""
    return msgspec.structs.replace(
        summarize_features(
            input_processor.get_model_features(),
            has_response_template=get_response_template(tokenizer) is not None,
        ),
        schema=supports_grammars(tokenizer),
        context_length=context_length,
        weights=weights,
    )


def assemble_model(runner: ModelRunner, tokenizer: Any) -> LoadedModel:
    """Combine a model runner and a tokenizer."""
    generation_config = runner.generation_config
    defaults = {}
    if getattr(generation_config, "do_sample", False):
        defaults = {
            name: getattr(generation_config, name, None)
            for name in ("temperature", "top_p", "top_k")
        }
    input_processor = InputProcessor(
        tokenizer,
        context=runner.context_length,
        vocabulary=runner.vocabulary_size,
        defaults=defaults,
    )
    return LoadedModel(
        runner,
        tokenizer,
        input_processor,
        collect_end_tokens(tokenizer, runner.config, generation_config),
    )


def load_template(path: str) -> str | dict[str, str]:
    """The chat template in a file or a tokenizer folder; a dict by name if it has several.

    Raises ModelError if there is none.
    """
    location = Path(path)
    try:
        if location.is_file():
            return location.read_text("utf-8")
        jinja_file = location / "chat_template.jinja"
        if jinja_file.is_file():
            return jinja_file.read_text("utf-8")
        tokenizer_config = decode_json((location / "tokenizer_config.json").read_bytes())
        return _read_templates(tokenizer_config["chat_template"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"there is no chat template in {path}: {error}") from error


def _read_templates(templates: Any) -> str | dict[str, str]:
    """The ``chat_template`` of tokenizer_config.json: a string, or a list of named templates."""
    if isinstance(templates, list):
        return {str(template["name"]): str(template["template"]) for template in templates}
    return str(templates)

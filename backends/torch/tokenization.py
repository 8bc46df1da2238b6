"""Input processing: prompts to token ids, parameters to sampling rules.

Invalid requests are rejected here, before they take a slot.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2.exceptions import TemplateError

from backends.torch.ipc import (
    ChatTurn,
    EngineSamplingParams,
    FailureKind,
    FunctionDefinition,
    PromptInput,
    RequestFailedEvent,
    StopParams,
)
from backends.torch.sampling import SamplingRules
from backends.torch.tool_calls import (
    build_function_schema,
    build_messages,
    build_plain_messages,
    detect_tool_call_format,
    supports_functions,
)


class RequestRejectedError(Exception):
    """The request can't be done; the parts of a Failed message."""

    def __init__(self, kind: FailureKind, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.failure_kind: FailureKind = kind
        self.param = param
        self.tokens: int | None = None
        self.limit: int | None = None

    def make_failed_event(self, job: int) -> RequestFailedEvent:
        """As a message."""
        return RequestFailedEvent(
            job, self.failure_kind, str(self), self.param, self.tokens, self.limit
        )


def make_too_long_error(tokens: int, limit: int, param: str) -> RequestRejectedError:
    """More tokens than the model takes."""
    refused = RequestRejectedError(
        "too_long", f"the prompt has {tokens} tokens and the model takes {limit}", param=param
    )
    refused.tokens, refused.limit = tokens, limit
    return refused


class InputProcessor:
    """Reads requests for one model."""

    def __init__(
        self, tokenizer: Any, *, context: int, vocabulary: int, defaults: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._context_length = context
        self._vocabulary_size = vocabulary
        self._defaults = defaults
        """The model's own ``temperature``, ``top_p`` and ``top_k``."""

    # --- prompts --------------------------------------------------------------------------------

    def tokenize_prompts(self, asked: PromptInput, ending: StopParams) -> list[list[int]]:
        """The token ids of each prompt. Raises RequestRejectedError."""
        if asked.turns:
            found = [self._tokenize_chat(asked, asked.turns)]
            param = "messages"
        else:
            found = [self._tokenize_prompt(asked, prompt) for prompt in asked.prompts]
            param = "prompt"
        if not found or not all(found):
            raise RequestRejectedError("invalid", "the prompt is empty", param=param)
        return [self._fit_context(ids, asked, ending, param) for ids in found]

    def _tokenize_prompt(self, asked: PromptInput, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, tuple):
            self._check_token_ids(prompt, "prompt")
            return list(prompt)
        if asked.as_user_message and self._tokenizer.chat_template:
            return self._tokenize_chat(asked, [ChatTurn("user", prompt)])
        special = asked.special_tokens is not False
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=special)
        return ids or self._get_start_tokens()

    def _get_start_tokens(self) -> list[int]:
        """An empty prompt is the beginning of a text, where the model has a token for that."""
        begin = self._tokenizer.bos_token_id
        return [] if begin is None else [begin]

    def _tokenize_chat(self, asked: PromptInput, turns: Sequence[ChatTurn]) -> list[int]:
        try:
            template = self.get_chat_template(asked)
            messages, tools = _build_conversation(turns, asked.functions, template)
            arguments = msgspec.json.decode(asked.template_arguments, type=dict[str, Any])
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=asked.generation_prompt and not asked.continue_final,
                continue_final_message=asked.continue_final,
                tokenize=False,
                **{
                    name: value
                    for name, value in arguments.items()
                    if name not in _RESERVED_TEMPLATE_ARGUMENTS
                },
            )
        except (TemplateError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise RequestRejectedError(
                "invalid", f"the chat template refuses this: {error}", param="messages"
            ) from error
        # A template writes them itself.
        special = asked.special_tokens is True
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def get_chat_template(self, asked: PromptInput) -> str:
        """The chat template for this input. Raises RequestRejectedError when there is none."""
        if not asked.template and not self._tokenizer.chat_template:
            raise RequestRejectedError(
                "unsupported", "this model has no chat template; it takes prompts", param="messages"
            )
        tools = [build_function_schema(one) for one in asked.functions] or None
        found: str = self._tokenizer.get_chat_template(asked.template, tools=tools)
        return found

    def _fit_context(
        self, ids: list[int], asked: PromptInput, ending: StopParams, param: str
    ) -> list[int]:
        room = self._context_length - (1 if ending.max_tokens != 0 else 0)
        keep = asked.truncate_to
        if keep is not None and keep < 0:
            wanted = 1 if ending.max_tokens is None else ending.max_tokens
            keep = max(self._context_length - wanted, 1)
        if keep:
            ids = ids[-min(keep, room) :]
        if len(ids) > room:
            raise make_too_long_error(len(ids), self._context_length, param)
        return ids

    # --- parameters -----------------------------------------------------------------------------

    def build_sampling_rules(self, asked: EngineSamplingParams) -> SamplingRules:
        """The rules of a row, every default resolved. Raises RequestRejectedError."""
        self._check_token_ids(tuple(asked.logit_bias), "logit_bias")
        self._check_token_ids(asked.allowed_token_ids or (), "allowed_token_ids")
        if asked.allowed_token_ids == ():
            raise RequestRejectedError("invalid", "no token is allowed", param="allowed_token_ids")
        for token, bias in asked.logit_bias.items():
            if not abs(bias) <= _MAX_FINITE:
                text = f"the bias of token {token} is {bias}; {-_MAX_FINITE:g} to {_MAX_FINITE:g}"
                raise RequestRejectedError("invalid", text, param="logit_bias")
        for name, low, high in _SAMPLING_RANGES:
            value = getattr(asked, name)
            if value is not None and not low <= value <= high:
                raise RequestRejectedError(
                    "invalid", f"{name} is {value}; {low} to {high}", param=f"{name}"
                )
        return SamplingRules(
            temperature=_get_first_set(asked.temperature, self._defaults.get("temperature"), 1.0),
            # At least one token always stays: nothing at all is the same as the likeliest alone.
            top_p=max(_get_first_set(asked.top_p, self._defaults.get("top_p"), 1.0), 0.0),
            top_k=max(_get_first_set(asked.top_k, self._defaults.get("top_k"), 0), 0),
            min_p=_get_first_set(asked.min_p, self._defaults.get("min_p"), 0.0),
            typical_p=_get_first_set(asked.typical_p, 1.0),
            repetition_penalty=_get_first_set(asked.repetition_penalty, 1.0),
            presence_penalty=_get_first_set(asked.presence_penalty, 0.0),
            frequency_penalty=_get_first_set(asked.frequency_penalty, 0.0),
            bias=asked.logit_bias,
            allowed_tokens=asked.allowed_token_ids,
            bad_sequences=self._tokenize_words(asked.bad_words),
            watermark=asked.watermark,
        )

    def _tokenize_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ways in which tokens may spell each word, at a text's beginning and within it."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelled in (word, f" {word}"):
                ids = tuple(self._tokenizer.encode(spelled, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _check_token_ids(self, ids: Sequence[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self._vocabulary_size:
                raise RequestRejectedError(
                    "invalid",
                    f"token {token} is none of the model's {self._vocabulary_size}",
                    param=param,
                )


def _build_conversation(
    turns: Sequence[ChatTurn], functions: Sequence[FunctionDefinition], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools, as this template takes them."""
    family = detect_tool_call_format(template)
    if not supports_functions(template):
        return list(build_plain_messages(turns, functions, family)), None
    tools = [{"type": "function", "function": build_function_schema(one)} for one in functions]
    return list(build_messages(turns, family)), tools or None


_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message",
     "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation",
     "max_length"}
)  # fmt: skip
"""Arguments of the call that a client's template variables must not take the place of."""

_MAX_FINITE = 1e6
"""More would be beyond what a logit can hold, and no number any more."""
_SAMPLING_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, float("inf")),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 1e-6, float("inf")),
    ("presence_penalty", -_MAX_FINITE, _MAX_FINITE),
    ("frequency_penalty", -_MAX_FINITE, _MAX_FINITE),
)


def _get_first_set(*values: Any) -> Any:
    return next(value for value in values if value is not None)

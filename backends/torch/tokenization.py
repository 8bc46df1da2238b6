"""Input processing: prompts to token ids, parameters to sampling rules.

Invalid requests are rejected here, before they take a slot.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from jinja2.exceptions import TemplateError

from backends.torch.ipc import (
    ChatTurn,
    EngineEvent,
    EngineSamplingParams,
    GenerateCommand,
    PromptInput,
    RequestFailedEvent,
    StopParams,
)
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.sampling import SamplingRules
from backends.torch.template_features import TemplateFeatures, inspect_template
from backends.torch.tool_calls import (
    build_function_schema,
    build_messages,
)
from protocols.core.json_text import decode_json

T = TypeVar("T")

_log = logging.getLogger(__name__)


def detokenize_ids(tokenizer: Any, ids: Sequence[int], vocabulary_size: int) -> str:
    """The text of these tokens, special ones included. Raises RequestRejectedError."""
    for i, token in enumerate(ids):
        if token >= vocabulary_size:
            text = f"tokens[{i}] is {token}; token ids are between 0 and {vocabulary_size - 1}"
            raise RequestRejectedError("invalid", text, param="tokens")
    decoded: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return decoded


def measure_longest_token(tokenizer: Any) -> int:
    """The length of the longest token in characters.

    A text has at least as many tokens as its own length divided by this.
    """
    return max(map(len, tokenizer.get_vocab()), default=1)


def is_surely_too_long(text: str, limit: int, longest: int) -> bool:
    """Whether a text certainly has more than ``limit`` tokens, as its length alone shows.

    Tokenizers may drop repeated white space, so it is not counted.
    """
    most = limit * longest
    return len(text) > most and len(" ".join(text.split())) > most


def measure_input(spec: GenerateCommand) -> int:
    """The characters that must be tokenized for a request; each call counts as some, too."""
    words = 2 * sum(_CALL_COST + len(word) for word in spec.sampling.bad_words)
    return words + measure_prompts(spec.input)


def measure_prompts(prompt_input: PromptInput) -> int:
    """The same for the prompts or the conversation alone."""
    texts = [prompt for prompt in prompt_input.prompts if isinstance(prompt, str)]
    texts += [turn.content for turn in prompt_input.turns]
    functions = sum(len(function.parameters) for function in prompt_input.functions)
    return functions + sum(_CALL_COST + len(text) for text in texts)


class BackgroundTokenizer:
    """Tokenizes long inputs in a thread, so that they do not delay the steps of other requests.

    ``wake`` is called, from that thread, when a result is there.
    """

    LONG_INPUT: Final = 16_384
    """Characters above which an input is long: tokenizing them takes several milliseconds."""

    def __init__(self, emit: Callable[[EngineEvent], None], wake: Callable[[], None]) -> None:
        self._emit = emit
        self._wake = wake
        self._executor = ThreadPoolExecutor(1, "tokenizer")
        self._pending: dict[int, tuple[Future[Any], Callable[[Any], None]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def run(
        self, number: int, length: int, work: Callable[[], T], finish: Callable[[T], None]
    ) -> None:
        """Call ``finish`` with the result of ``work``, or emit the failure of request ``number``.

        An input of ``length`` characters is done at once if it is short, otherwise ``work`` runs
        in the thread, and ``finish`` in a later ``finish_pending``.
        """
        if length <= self.LONG_INPUT:
            self._finish(number, work, finish)
            return
        future = self._executor.submit(work)
        self._pending[number] = future, finish
        future.add_done_callback(lambda _: self._wake())

    def finish_pending(self) -> None:
        """Finish the requests whose inputs have been tokenized."""
        for number, (future, finish) in list(self._pending.items()):
            if future.done():
                del self._pending[number]
                self._finish(number, future.result, finish)

    def cancel(self, number: int) -> None:
        """Drop a request; tokenization that has begun goes on, and its result is dropped."""
        if pending := self._pending.pop(number, None):
            pending[0].cancel()

    def _finish(self, number: int, work: Callable[[], T], finish: Callable[[T], None]) -> None:
        try:
            finish(work())
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(number))
        except Exception as error:  # noqa: BLE001 - one request must not end the others
            _log.exception("a request could not be accepted")
            message = f"the local model failed: {type(error).__name__}"
            self._emit(RequestFailedEvent(number, "failed", message))


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
        self._longest_token = measure_longest_token(tokenizer)
        self.serves_unknown_calls = False
        """Whether functions are offered to a model whose calls are not understood."""
        self._features: dict[str, TemplateFeatures] = {}
        """By chat template; the least recently used are evicted."""

    # --- prompts --------------------------------------------------------------------------------

    def check_sizes(self, spec: GenerateCommand) -> None:
        """Reject lists and texts that are too long, before anything is computed from them.

        Raises RequestRejectedError.
        """
        words: Sequence[tuple[str, Sequence[str]]] = (
            ("bad_words", spec.sampling.bad_words),
            ("stop", spec.stopping.stop),
        )
        tokens: Sequence[tuple[str, Sequence[int]]] = (
            ("stop_token_ids", spec.stopping.stop_token_ids),
            ("allowed_token_ids", spec.sampling.allowed_token_ids or ()),
        )
        sizes = [(name, len(texts), MAX_WORDS) for name, texts in words]
        sizes += [(name, len(ids), self._vocabulary_size) for name, ids in tokens]
        for name, size, most in sizes:
            if size > most:
                message = f"{name} has {size} items; at most {most} are accepted"
                raise RequestRejectedError("invalid", message, param=name)
        for name, texts in words:
            length = sum(map(len, texts))
            if length > MAX_WORDS_LENGTH:
                message = f"{name} has {length} characters; at most {MAX_WORDS_LENGTH} are accepted"
                raise RequestRejectedError("invalid", message, param=name)
        if spec.input.truncate_to is None:
            self.check_prompt_lengths(spec.input)

    def check_prompt_lengths(self, prompt_input: PromptInput) -> None:
        """Reject prompts that surely have more tokens than the context.

        Raises RequestRejectedError.
        """
        limit = self._context_length
        for prompt in prompt_input.prompts:
            if isinstance(prompt, tuple):
                if len(prompt) > limit:
                    raise make_too_long_error(len(prompt), limit, "prompt")
            elif is_surely_too_long(prompt, limit, self._longest_token):
                raise make_too_long_error(None, limit, "prompt")
        # A chat template may drop messages or parts of them, as those of reasoning models do;
        # of the last one it keeps everything.
        if prompt_input.turns:
            last_content = prompt_input.turns[-1].content
            if is_surely_too_long(last_content, limit, self._longest_token):
                raise make_too_long_error(None, limit, "messages")

    def tokenize_prompts(self, prompt_input: PromptInput, stopping: StopParams) -> list[list[int]]:
        """The token ids of each prompt. Raises RequestRejectedError."""
        if prompt_input.turns:
            prompts = [self._tokenize_chat(prompt_input, prompt_input.turns)]
            param = "messages"
        else:
            prompts = [
                self._tokenize_prompt(prompt_input, prompt) for prompt in prompt_input.prompts
            ]
            param = "prompt"
        if not prompts or not all(prompts):
            raise RequestRejectedError("invalid", "the prompt is empty", param=param)
        return [self._fit_context(ids, prompt_input, stopping, param) for ids in prompts]

    def tokenize_input(self, prompt_input: PromptInput) -> list[int]:
        """The token ids of a conversation or of one text; of "" none.

        Raises RequestRejectedError.
        """
        if prompt_input.turns:
            return self._tokenize_chat(prompt_input, prompt_input.turns)
        special = prompt_input.special_tokens is not False
        text = prompt_input.prompts[0]
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _tokenize_prompt(
        self, prompt_input: PromptInput, prompt: str | tuple[int, ...]
    ) -> list[int]:
        if isinstance(prompt, tuple):
            self._check_token_ids(prompt, "prompt")
            return list(prompt)
        if prompt_input.as_user_message and self._tokenizer.chat_template:
            return self._tokenize_chat(prompt_input, [ChatTurn("user", prompt)])
        special = prompt_input.special_tokens is not False
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=special)
        return ids or self._get_start_tokens()

    def _get_start_tokens(self) -> list[int]:
        """The tokens of an empty prompt: the model's start token, if it has one."""
        begin = self._tokenizer.bos_token_id
        return [] if begin is None else [begin]

    def _tokenize_chat(self, prompt_input: PromptInput, turns: Sequence[ChatTurn]) -> list[int]:
        try:
            template = self.get_chat_template(prompt_input)
            features = self.get_features(template)
            functions = prompt_input.functions
            messages = list(build_messages(turns, functions, features))
            shown = functions if features.shows_functions else ()
            tools = [
                {
                    "type": "function",
                    "function": build_function_schema(
                        one, needs_description=features.needs_descriptions
                    ),
                }
                for one in shown
            ] or None
            arguments = decode_json(prompt_input.template_arguments, kind=dict[str, Any])
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt_input.generation_prompt
                and not prompt_input.continue_final,
                continue_final_message=prompt_input.continue_final,
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
        except _DEPTH_ERRORS:
            raise RequestRejectedError(
                "invalid", "the chat template is nested too deep, or calls itself", param="messages"
            ) from None
        # Chat templates contain the special tokens.
        special = prompt_input.special_tokens is True
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def get_model_features(self) -> TemplateFeatures | None:
        """What the model's own chat template supports with tools; None if it has none."""
        if not self._tokenizer.chat_template:
            return None
        tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
        return self.get_features(self._tokenizer.get_chat_template(None, tools=tools))

    def get_features(self, template: str) -> TemplateFeatures:
        """What a chat template supports."""
        features = self._features.pop(template, None)
        if features is None:
            features = inspect_template(
                template,
                functools.partial(
                    self._tokenizer.apply_chat_template,
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=False,
                ),
            )
        self._features[template] = features
        while len(self._features) > _MAX_TEMPLATES:
            del self._features[next(iter(self._features))]
        return features

    def get_chat_template(self, prompt_input: PromptInput) -> str:
        """The chat template for this input. Raises RequestRejectedError when there is none."""
        if not prompt_input.template and not self._tokenizer.chat_template:
            raise RequestRejectedError(
                "unsupported", "this model has no chat template; it takes prompts", param="messages"
            )
        tools = [build_function_schema(one) for one in prompt_input.functions] or None
        template: str = self._tokenizer.get_chat_template(prompt_input.template, tools=tools)
        return template

    def _fit_context(
        self, ids: list[int], prompt_input: PromptInput, stopping: StopParams, param: str
    ) -> list[int]:
        limit = self._context_length - (1 if stopping.max_tokens != 0 else 0)
        keep = prompt_input.truncate_to
        if keep is not None and keep < 0:
            max_tokens = 1 if stopping.max_tokens is None else stopping.max_tokens
            keep = max(self._context_length - max_tokens, 1)
        if keep:
            ids = ids[-min(keep, limit) :]
        if len(ids) > limit:
            raise make_too_long_error(len(ids), self._context_length, param)
        return ids

    # --- parameters -----------------------------------------------------------------------------

    def build_sampling_rules(self, sampling: EngineSamplingParams) -> SamplingRules:
        """The sampling rules, with all defaults. Raises RequestRejectedError."""
        self._check_token_ids(tuple(sampling.logit_bias), "logit_bias")
        self._check_token_ids(sampling.allowed_token_ids or (), "allowed_token_ids")
        if sampling.allowed_token_ids == ():
            raise RequestRejectedError("invalid", "no token is allowed", param="allowed_token_ids")
        for token, bias in sampling.logit_bias.items():
            if not abs(bias) <= _MAX_FINITE:
                text = f"the bias of token {token} is {bias}; {-_MAX_FINITE:g} to {_MAX_FINITE:g}"
                raise RequestRejectedError("invalid", text, param="logit_bias")
        for name, low, high in _SAMPLING_RANGES:
            value = getattr(sampling, name)
            if value is not None and not low <= value <= high:
                raise RequestRejectedError(
                    "invalid", f"{name} is {value}; {low} to {high}", param=f"{name}"
                )
        return SamplingRules(
            temperature=_get_first_set(
                sampling.temperature, self._defaults.get("temperature"), 1.0
            ),
            # At least one token always remains: 0 means the likeliest token only.
            top_p=max(_get_first_set(sampling.top_p, self._defaults.get("top_p"), 1.0), 0.0),
            top_k=max(_get_first_set(sampling.top_k, self._defaults.get("top_k"), 0), 0),
            min_p=_get_first_set(sampling.min_p, self._defaults.get("min_p"), 0.0),
            typical_p=_get_first_set(sampling.typical_p, 1.0),
            repetition_penalty=_get_first_set(sampling.repetition_penalty, 1.0),
            presence_penalty=_get_first_set(sampling.presence_penalty, 0.0),
            frequency_penalty=_get_first_set(sampling.frequency_penalty, 0.0),
            bias=sampling.logit_bias,
            allowed_tokens=sampling.allowed_token_ids,
            bad_sequences=self._tokenize_words(sampling.bad_words),
            watermark=sampling.watermark,
        )

    def _tokenize_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of each word, at the start of a text and within it."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelling in (word, f" {word}"):
                ids = tuple(self._tokenizer.encode(spelling, add_special_tokens=False))
                if ids:
                    sequences[ids] = None
        return tuple(sequences)

    def _check_token_ids(self, ids: Sequence[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self._vocabulary_size:
                raise RequestRejectedError(
                    "invalid",
                    f"token {token} is none of the model's {self._vocabulary_size}",
                    param=param,
                )


_DEPTH_ERRORS: Final = (RecursionError, SyntaxError, MemoryError)
"""Of templates that are nested too deep: of Jinja's parser, and of Python's compiler."""
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message",
     "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation",
     "max_length"}
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that template variables must not replace."""

_MAX_TEMPLATES = 16
"""Templates whose features are remembered."""
_CALL_COST = 64
"""Characters that take as long to tokenize as a call of the tokenizer takes by itself."""
MAX_WORDS = 1024
"""Limit of stop strings, and of bad words, in one request."""
MAX_WORDS_LENGTH = 65_536
"""Limit of their characters in all."""

_MAX_FINITE = 1e6
"""A larger value could make a logit infinite."""
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

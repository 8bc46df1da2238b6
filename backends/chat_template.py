"""Chat templates, for workers that accept only a prompt as text.

A template is read from a tokenizer's folder as transformers writes it (``chat_template.jinja``, or
in ``tokenizer_config.json``), or from a Jinja file. It runs in Jinja's sandbox with the variables
that such templates expect: messages, tools, the special tokens, ``raise_exception``.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Raw

from protocols.core.call_arguments import read_arguments
from protocols.core.errors import InvalidParameter
from protocols.core.json_text import decode_json
from protocols.core.request import GenerationRequest, Message, Tool

_MAX_CONFIG_SIZE: Final = 16 << 20
"""Bytes of ``tokenizer_config.json``, which may hold thousands of added tokens."""
_MAX_PROMPT: Final = 64 << 20
"""Characters of a prompt: a template may repeat what it gets any number of times."""
_CONTINUATION_MARK: Final = "\ue000interlingua\ue000"
"""Marks the end of the assistant message that is continued."""
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
"""Attributes of every dict; they precede an item of the same name."""


class ChatTemplate:
    """A PromptRenderer with the template at ``path``, a folder or a file.

    Raises ValueError for a path without a template, and for an invalid template.
    """

    def __init__(self, path: str) -> None:
        source, self._special_tokens = _read_template(Path(path))
        self._template = _compile_template(source)
        self._base_context = {**self._template.globals, **self._special_tokens}

    def render_prompt(self, request: GenerationRequest) -> str:
        """See ``protocols.core.interfaces.PromptRenderer``."""
        templating = request.templating
        messages = [_convert_message(one) for one in request.messages]
        continues = bool(templating.continue_final)
        if continues and messages:
            messages[-1]["content"] = f"{request.messages[-1].text}{_CONTINUATION_MARK}"
        adds_generation_prompt = templating.add_generation_prompt is not False and not continues
        template, base_context = self._template, self._base_context
        if templating.arguments:
            base_context = {
                **template.globals,
                **_decode_arguments(templating.arguments),
                **self._special_tokens,
            }
        variables = {
            **base_context,
            "messages": messages,
            "tools": [_convert_tool(one) for one in request.tools] if request.tools else None,
            "add_generation_prompt": adds_generation_prompt,
        }
        environment = template.environment
        context = environment.context_class(environment, variables, template.name, template.blocks)
        try:
            text = _join_prompt(template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
            message = str(e)[:300]
            raise InvalidParameter(
                f"the model's chat template refuses these messages: {message}", param="messages"
            ) from None
        return text.partition(_CONTINUATION_MARK)[0] if continues else text


def _join_prompt(pieces: Iterable[str]) -> str:
    """Raises TemplateError for a prompt that is too large, before it is built."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _MAX_PROMPT:
            raise TemplateError(f"the prompt has more than {_MAX_PROMPT} characters")
        kept.append(piece)
    return "".join(kept)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a faster lookup of the items of a dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See ``SandboxedEnvironment.getattr``, which returns an item if there is no attribute."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _compile_template(source: str) -> Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    try:
        template = environment.from_string(source)
    except TemplateError as e:
        raise ValueError(f"holds an invalid chat template: {e}") from None
    template.globals = dict(template.globals)  # a chain of two, which each prompt would copy
    return template


def _read_template(path: Path) -> tuple[str, dict[str, str]]:
    """The template's text, and the special tokens by name."""
    if path.is_file():
        return path.read_text("utf-8"), {}
    config = _read_json_object(path / "tokenizer_config.json")
    template_file = path / "chat_template.jinja"
    source = (
        template_file.read_text("utf-8")
        if template_file.is_file()
        else _select_default_template(config)
    )
    if not source:
        raise ValueError("holds no chat template: neither a chat_template.jinja nor one in "
                         "tokenizer_config.json")  # fmt: skip
    tokens = {
        name: _get_token_text(value) for name, value in config.items() if name.endswith("_token")
    }
    return source, {name: text for name, text in tokens.items() if text is not None}


def _read_json_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_CONFIG_SIZE:
        raise ValueError(f"holds a {path.name} that is too large")
    try:
        return decode_json(path.read_bytes(), kind=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"holds an invalid {path.name}: {e}") from None


def _select_default_template(config: Mapping[str, Any]) -> str:
    match config.get("chat_template"):
        case str() as source:
            return source
        case list() as entries:
            by_name = {
                entry["name"]: entry["template"] for entry in entries if isinstance(entry, dict)
            }
            return str(by_name.get("default", ""))
        case _:
            return ""


def _get_token_text(value: Any) -> str | None:
    """A special token, which may be written as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


# --- variables of a template ----------------------------------------------------------------------


def _decode_arguments(arguments: Mapping[str, Raw]) -> dict[str, Any]:
    return {name: decode_json(raw) for name, raw in arguments.items()}


def _convert_message(message: Message) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _convert_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    if tool.parameters is not None:
        function["parameters"] = decode_json(tool.parameters)
    return {"type": "function", "function": function}


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent or 0) if indent else encoded).decode()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)

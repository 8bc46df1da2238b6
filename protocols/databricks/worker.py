"""The dialect towards workers: requests, losses, and what their errors mean.

Everything goes to one path, on which an endpoint knows its task by the body's fields.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from protocols.body import decode_value
from protocols.core.errors import ContextTooLong, GatewayError, ModelNotFound, UnsupportedFeature
from protocols.core.interfaces import ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    Message,
    NamedTool,
    Prompt,
    RefusalPart,
    Request,
    TextPart,
    VideoPart,
)
from protocols.databricks.profiles import EFFORT_MAPPING, EXTRA_PARAM_NAMES, build_profile
from protocols.databricks.tables import MAX_TOOLS
from protocols.openai import faults
from protocols.openai.decoder import GenerationDecoder
from protocols.openai.faults import WorkerErrorBody
from protocols.openai.narrowing import RequestReducer, remove_logprobs, remove_parts
from protocols.openai.tools import restrict_tools
from protocols.openai.vectors import EmbeddingDecoder
from protocols.openai.worker import RequestWriter

_encode = msgspec.json.Encoder().encode
_JSON_HEADERS: Final = (("Content-Type", "application/json"),)
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    FilePart: "files",
    RefusalPart: "refusals",
    VideoPart: "videos",
}
_USAGE_CONTEXT_PREFIX: Final = "usage_context."


class DatabricksUpstream:
    """Writes requests for serving endpoints, and reads what they answer.

    ``source`` is the dialect's name: what its own clients send beside the reference goes along in
    ``extra_params``, and with ``extra_params`` what any client does. ``pay_per_token``: endpoints
    that give one answer at a time, and can truncate.
    """

    def __init__(self, source: str, *, pay_per_token: bool, extra_params: bool) -> None:
        self._source = source
        self._pay_per_token = pay_per_token
        self._extra_params = extra_params
        self._writers = {
            extra: RequestWriter(
                build_profile(pay_per_token=pay_per_token, extra=extra), "", powers=False
            )
            for extra in (False, True)
        }

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        narrow = self._reduce_request(request, names)
        return (
            *narrow.unsupported_parameters,
            *self._select_writer(request).unsupported_parameters(narrow.request, names),
        )

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Raises ModelNotFound, Unsupported."""
        texts = request.inputs if isinstance(request, EmbeddingRequest) else request.prompts
        _check_texts(texts, "input" if isinstance(request, EmbeddingRequest) else "prompt")
        writer = self._select_writer(request)
        asked = replace(self._reduce_request(request, {}).request, extra={})
        _, body = writer.write_body(asked)
        del body["model"]
        if isinstance(request, GenerationRequest):
            _finish_body(body, request)
        extra = {name: body.pop(name) for name in EXTRA_PARAM_NAMES & body.keys()}
        if request.source == self._source:
            extra |= {
                n: decode_value(raw) for n, raw in request.extra.items() if writer.forwards_field(n)
            }
            if request.client_id is not None:
                body["client_request_id"] = request.client_id
        if extra:
            body["extra_params"] = {name: _as_text(extra[name]) for name in sorted(extra)}
        if context := _build_usage_context(request):
            body["usage_context"] = context
        return UpstreamRequest(_build_path(request.model), _encode(body), _JSON_HEADERS)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        complaint = partial(faults.raise_worker_error, judge=map_worker_error)
        if isinstance(request, EmbeddingRequest):
            return EmbeddingDecoder(request, complaint=complaint)
        narrow = self._reduce_generation(request, {})
        echoes = self._select_writer(request).expects_echo(narrow.request)
        return GenerationDecoder(narrow.request, echoes=echoes, complaint=complaint)

    def _select_writer(self, request: Request) -> RequestWriter:
        return self._writers[self._extra_params or request.source == self._source]

    # --- requests ---------------------------------------------------------------------------------

    def _reduce_request(self, request: Request, names: Mapping[str, str]) -> RequestReducer[Any]:
        """What of the request an endpoint can be asked."""
        if isinstance(request, EmbeddingRequest):
            vectors = RequestReducer(request, names)
            vectors.drop_foreign_extra(self._source)
            vectors.set_field(
                "encoding", "float"
            )  # base64 is a form of the answer, which is ours to give
            return vectors
        return self._reduce_generation(request, names)

    def _reduce_generation(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> RequestReducer[GenerationRequest]:
        narrow = RequestReducer(request, names)
        narrow.drop_foreign_extra(self._source)
        narrow.drop_fields("sampling.logit_bias")
        narrow.set_field("given", request.given - {"max_completion_tokens"})
        if request.kind == "chat":
            if self._pay_per_token and (request.n or 1) > 1:
                narrow.drop_fields("n", detail="one at a time")
            _reduce_messages(narrow)
            _reduce_tools(narrow)
            _reduce_reasoning(narrow, own=request.source == self._source)
        else:
            if (request.n or 1) > 1:
                narrow.drop_fields("n", detail="those of one prompt have one index")
            narrow.set_field("n", None)
            narrow.set_field(
                "templating.mode", "raw"
            )  # an endpoint wraps a prompt, and stays at its task
            remove_logprobs(narrow)
        return narrow


def _reduce_messages(narrow: RequestReducer[GenerationRequest]) -> None:
    remove_parts(narrow, _UNSUPPORTED_PARTS)
    if any(message.name and message.role != "user" for message in narrow.request.messages):
        narrow.report("messages", "dropped", "names")
    narrow.set_field(
        "messages", tuple(_reduce_message(message) for message in narrow.request.messages)
    )


def _reduce_message(message: Message) -> Message:
    """The message as an endpoint takes it: no name but a user's, no blank text beside calls."""
    name = message.name if message.role == "user" else None
    blank = bool(message.tool_calls) and not message.text.strip()
    kept = tuple(part for part in message.parts if not (blank and isinstance(part, TextPart)))
    return replace(message, name=name, parts=kept)


def _reduce_tools(narrow: RequestReducer[GenerationRequest]) -> None:
    """No more than may be; the one that must be called is among them."""
    choice, tools = restrict_tools(narrow.request.tool_choice, narrow.request.tools)
    if len(tools) > MAX_TOOLS:
        narrow.report("tools", "clamped", f"{len(tools)} to {MAX_TOOLS}")
        named = choice.name if isinstance(choice, NamedTool) else None
        kept = sorted(tools, key=lambda tool: tool.name != named)[:MAX_TOOLS]
        narrow.set_field("tools", tuple(kept))
        narrow.set_field("tool_choice", choice)


def _reduce_reasoning(narrow: RequestReducer[GenerationRequest], *, own: bool) -> None:
    """``thinking`` tells what is left out here without a loss."""
    asked = narrow.request.reasoning
    if asked is None:
        return
    if asked.effort == "none":
        narrow.drop_fields("reasoning.effort")
    elif (nearest := EFFORT_MAPPING.get(asked.effort or "")) is not None:
        narrow.report("reasoning.effort", "clamped", f"{asked.effort} to {nearest}")
        narrow.set_field("reasoning.effort", nearest)
    if asked.include is False and not own:
        narrow.report("reasoning.include", "approximated", "no thinking at all")
    narrow.set_field("reasoning.budget", None)
    narrow.set_field("reasoning.include", None)


def _finish_body(body: dict[str, Any], request: GenerationRequest) -> None:
    """What no table can say."""
    body.pop("stream_options", None)
    body["stream"] = request.stream  # the reference and the service differ in what silence means
    if request.kind != "chat":
        if request.templating.mode != "server":
            body["use_raw_prompt"] = True
    elif request.reasoning is not None:
        budget = request.reasoning.budget
        if request.reasoning.include is False or budget == 0:
            body["thinking"] = {"type": "disabled"}
        elif budget is not None:
            body["thinking"] = {"type": "enabled", "budget_tokens": budget}


def _check_texts(texts: tuple[Prompt, ...], param: str) -> None:
    if not all(isinstance(one, str) for one in texts):
        raise UnsupportedFeature("The model's workers take text, not token ids.", param=param)


def _as_text(got: Any) -> str:
    """A value in ``extra_params``, where each is a string."""
    return got if isinstance(got, str) else _encode(got).decode()


def _build_usage_context(request: Request) -> dict[str, str]:
    return {
        name.removeprefix(_USAGE_CONTEXT_PREFIX): text
        for name, text in request.labels.items()
        if name.startswith(_USAGE_CONTEXT_PREFIX)
    }


def _build_path(model: str) -> str:
    """Where an endpoint answers. Its name is one segment, whatever is in it."""
    if model in ("", ".", ".."):
        raise ModelNotFound("No serving endpoint can have this name.", model=model)
    return f"/serving-endpoints/{quote(model, safe='')}/invocations"


# --- errors ---------------------------------------------------------------------------------------

_STATUS_BY_CODE: Final[Mapping[str, int]] = {
    "BAD_REQUEST": 400,
    "MALFORMED_REQUEST": 400,
    "INVALID_PARAMETER_VALUE": 400,
    "UNAUTHENTICATED": 401,
    "CUSTOMER_UNAUTHORIZED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_DOES_NOT_EXIST": 404,
    "ENDPOINT_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "REQUEST_LIMIT_EXCEEDED": 429,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL_ERROR": 500,
    "NOT_IMPLEMENTED": 501,
    "TEMPORARILY_UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""What a code stands for, which says more than the status. Source: mlflow 3.17, exceptions.py."""
_PROMPT_TOO_LONG: Final = re.compile(r"the prompt has (\d+) tokens, the model's limit is (\d+)")


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """A ``protocols.openai.faults.WorkerErrorMapper`` that goes by the error's code."""
    status = _STATUS_BY_CODE.get(str(fault.code), status)
    if found := _PROMPT_TOO_LONG.search(fault.text):
        return ContextTooLong(fault.text, tokens=int(found[1]), limit=int(found[2]))
    return faults.map_worker_error(status, fault, retry_after)

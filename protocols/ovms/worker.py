"""The dialect towards workers: requests, losses, and what their errors mean."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec

from protocols.core.errors import ContextTooLong, GatewayError, UnsupportedFeature, WorkerFailed
from protocols.core.interfaces import ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    Request,
    VideoPart,
)
from protocols.openai import faults
from protocols.openai.decoder import GenerationDecoder
from protocols.openai.faults import WorkerErrorBody
from protocols.openai.narrowing import (
    RequestReducer,
    keep_first_prompt,
    remove_logprobs,
    remove_parts,
)
from protocols.openai.vectors import EmbeddingDecoder
from protocols.openai.worker import RequestWriter, uses_chat_endpoint
from protocols.ovms.profiles import MAX_BEAM_WIDTH, SEED_COUNT, WORKER_PROFILES
from protocols.ovms.requests import MAX_IGNORE_EOS_TOKENS

_encode = msgspec.json.Encoder().encode
_JSON_HEADERS: Final = (("Content-Type", "application/json"),)
_ROOT: Final = "/v3"

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    VideoPart: "videos",
    FilePart: "files",
}
_EARLY_UNSUPPORTED_PARTS: Final = {**_UNSUPPORTED_PARTS, ImagePart: "images", AudioPart: "audio"}
_BEAM_SEARCH_CONFLICTS: Final = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
)
"""What beam search refuses."""


class OvmsUpstream:
    """Writes requests for servers of one release, and reads what they answer.

    ``source`` is the dialect's name: unknown fields of its own clients go along.
    """

    def __init__(self, profile: str, source: str) -> None:
        self._early = profile == "2024"
        self._protocol_name = source
        self._openai_writer = RequestWriter(WORKER_PROFILES[profile], _ROOT, powers=False)
        # The early release lists no models; there, KServe's path is the one that tells.
        path = "/v2/health/ready" if self._early else f"{_ROOT}/models"
        self.health_request = UpstreamRequest(path, b"", method="GET")

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, EmbeddingRequest):
            vectors = RequestReducer(request, names)
            vectors.drop_foreign_extra(self._protocol_name)
            return (
                *vectors.unsupported_parameters,
                *self._openai_writer.unsupported_parameters(vectors.request, names),
            )
        narrow = self._adapt_request(request, names)
        return (
            *narrow.unsupported_parameters,
            *self._openai_writer.unsupported_parameters(narrow.request, names),
        )

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Raises Unsupported for token ids to go on."""
        if isinstance(request, EmbeddingRequest):
            vectors = RequestReducer(request, {})
            vectors.drop_foreign_extra(self._protocol_name)
            return self._openai_writer.encode_request(vectors.request)
        asked = self._adapt_request(request, {}).request
        if not all(isinstance(prompt, str) for prompt in asked.prompts):
            raise UnsupportedFeature(
                "The model's workers take text, not token ids.", param="prompt"
            )
        path, body = self._openai_writer.write_body(asked)
        self._adjust_body(body, asked)
        return UpstreamRequest(f"{_ROOT}/{path}", _encode(body), _JSON_HEADERS)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        complaint = partial(faults.raise_worker_error, judge=map_worker_error)
        if isinstance(request, EmbeddingRequest):
            return EmbeddingDecoder(request, complaint=complaint)
        asked = self._adapt_request(request, {}).request
        echoes = self._openai_writer.expects_echo(asked)
        return GenerationDecoder(asked, echoes=echoes, complaint=complaint)

    # --- requests ---------------------------------------------------------------------------------

    def _adapt_request(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> RequestReducer[GenerationRequest]:
        """What of the request this server can be asked."""
        narrow = RequestReducer(request, names)
        narrow.drop_foreign_extra(self._protocol_name)
        keep_first_prompt(narrow)
        narrow.drop_fields("sampling.logit_bias")
        if (seed := request.sampling.seed) is not None and seed >= SEED_COUNT:
            narrow.report("sampling.seed", "approximated", f"{seed} to {seed % SEED_COUNT}")
            narrow.set_field("sampling.seed", seed % SEED_COUNT)
        _adapt_beam_search(narrow)
        if self._early:
            _adapt_for_early_release(narrow)
        else:
            _adapt_for_current_release(narrow)
        if request.want.usage == "each":
            narrow.set_field("want.usage", "final")
        return narrow

    def _adjust_body(self, body: dict[str, Any], asked: GenerationRequest) -> None:
        """What the parameters of one field alone can't say."""
        if not uses_chat_endpoint(asked) and "logprobs" in body:
            body["logprobs"] = 1  # the only number it takes: the token itself
        if body.get("top_logprobs") == 0:
            del body["top_logprobs"]
        if asked.stream:
            body.pop("include_stop_str_in_output", None)  # always so, and false is refused
        if not self._early:
            return
        body.pop("stream_options", None)
        sampling = asked.sampling
        if sampling.temperature is None and sampling.do_sample is None and not sampling.beam_width:
            body["temperature"] = 1.0  # it would be greedy, which no client means by saying nothing


def _adapt_beam_search(narrow: RequestReducer[GenerationRequest]) -> None:
    """Beam search is never streamed; several answers are the best of as many beams, or more."""
    if narrow.request.stream:
        narrow.drop_fields("sampling.beam_width", detail="not with a stream")
    width = narrow.request.sampling.beam_width
    if width is not None:
        narrow.drop_fields(*_BEAM_SEARCH_CONFLICTS, detail="not with beam search")
    if (narrow.request.n or 1) > min(width or 1, MAX_BEAM_WIDTH):
        narrow.drop_fields("n", detail="without beam search")


def _adapt_for_current_release(narrow: RequestReducer[GenerationRequest]) -> None:
    remove_parts(narrow, _UNSUPPORTED_PARTS)
    if narrow.request.stream:
        remove_logprobs(narrow, "not with a stream")
        if narrow.request.stopping.stop and not narrow.request.stopping.include_stop:
            narrow.report("stopping.stop", "approximated", "it stays in the text of a stream")


def _adapt_for_early_release(narrow: RequestReducer[GenerationRequest]) -> None:
    remove_parts(narrow, _EARLY_UNSUPPORTED_PARTS)
    remove_logprobs(narrow)
    narrow.drop_fields("tools", "output")
    if any(message.tool_calls for message in narrow.request.messages):
        narrow.report("messages", "dropped", "tool calls")
    narrow.set_field("given", narrow.request.given - {"max_completion_tokens"})
    stopping = narrow.request.stopping
    if stopping.ignore_eos and (stopping.max_tokens or 0) > MAX_IGNORE_EOS_TOKENS:
        detail = f"{stopping.max_tokens} to {MAX_IGNORE_EOS_TOKENS}"
        narrow.report("stopping.max_tokens", "clamped", detail)
        narrow.set_field("stopping.max_tokens", MAX_IGNORE_EOS_TOKENS)


# --- errors ---------------------------------------------------------------------------------------

_GRAPH_ERROR_PATTERN: Final = re.compile(
    r"Mediapipe execution failed\. MP status - (?P<code>[A-Z_]+):\s*"
    r"(?:CalculatorGraph::Run\(\) failed:\s*)?"
    r'(?:Calculator::\w+\(\) for node "[^"]*" failed:\s*)?',
)
_JSON_ERROR_PATTERN: Final = re.compile(r"The file is not valid json - ")
_CONTEXT_LENGTH_PATTERNS: Final = (
    re.compile(
        r"Number of prompt tokens: (\d+)(?: \+ max tokens value: \d+)?"
        r" exceeds model max length: (\d+)"
    ),
    re.compile(r"Input length exceeds pipeline capabilities: (\d+) > (\d+)"),
    re.compile(r"Input length (\d+) longer than allowed (\d+)"),
    re.compile(r"Input length exceeds the maximum allowed length()()"),
)
_STATUS_BY_CODE: Final[Mapping[str, int]] = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 400,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
}
"""Of what the graph says; anything else is the server's failure."""
_PATH_ERROR_PATTERN: Final = re.compile(r"Invalid request URL|Wrong endpoint")
_API_KEY_ERROR: Final = "Unauthorized request due to invalid or missing api-key"


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """A ``protocols.openai.faults.WorkerErrorMapper`` that takes the graph's sentence off what its node said.

    What the graph says inside an answer (status 0) is the server's failure, unless the prompt was
    too long: it checks a request before the first event.
    """
    text = fault.text
    if sentence := _GRAPH_ERROR_PATTERN.match(text):
        text = text[sentence.end() :]
        status = _STATUS_BY_CODE.get(sentence["code"], 500) if status else 500
    elif text == _API_KEY_ERROR:
        status = 401
    elif status == 412:  # noqa: PLR2004 - its own for what it could not read
        text, status = _JSON_ERROR_PATTERN.sub("", text), 400
    for pattern in _CONTEXT_LENGTH_PATTERNS:
        if found := pattern.search(text):
            tokens, limit = (int(one) if one else None for one in found.groups())
            return ContextTooLong(text, tokens=tokens, limit=limit)
    if _PATH_ERROR_PATTERN.match(text):
        error = WorkerFailed("The worker does not know the gateway's path.", status=status)
        error.add_note(f"the worker said: {text}")
        return error
    return faults.map_worker_error(status, msgspec.structs.replace(fault, text=text), retry_after)

"""The dialect towards workers: requests, losses, and what their errors mean."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec

from gateway.core.errors import ContextTooLong, GatewayError, Unsupported, WorkerFailed
from gateway.core.loss import Loss
from gateway.core.ports import Decoder, WireRequest
from gateway.core.types import (
    AudioPart,
    EmbedRequest,
    FilePart,
    GenerateRequest,
    ImagePart,
    Part,
    Request,
    VideoPart,
)
from protocols.openai import faults
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.faults import Fault
from protocols.openai.narrowing import Narrowing, alone, only_parts, without_logprobs
from protocols.openai.vectors import VectorDecoder
from protocols.openai.worker import Writer, is_chat
from protocols.ovms.profiles import MOST_BEAMS, PROFILES, SEEDS
from protocols.ovms.requests import IGNORE_EOS_LIMIT

_encode = msgspec.json.Encoder().encode
_JSON: Final = (("Content-Type", "application/json"),)
_ROOT: Final = "/v3"

_UNSEEN: Final[Mapping[type[Part], str]] = {VideoPart: "videos", FilePart: "files"}
_EARLY_UNSEEN: Final = {**_UNSEEN, ImagePart: "images", AudioPart: "audio"}
_WITH_BEAMS: Final = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
)
"""What beam search refuses."""


class Worker:
    """Writes requests for servers of one release, and reads what they answer.

    ``source`` is the dialect's name: unknown fields of its own clients go along.
    """

    def __init__(self, profile: str, source: str) -> None:
        self._early = profile == "2024"
        self._protocol_name = source
        self._openai_writer = Writer(PROFILES[profile], _ROOT, powers=False)
        # The early release lists no models; there, KServe's path is the one that tells.
        path = "/v2/health/ready" if self._early else f"{_ROOT}/models"
        self.health_request = WireRequest(path, b"", method="GET")

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        if isinstance(request, EmbedRequest):
            vectors = Narrowing(request, names)
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

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``. Raises Unsupported for token ids to go on."""
        if isinstance(request, EmbedRequest):
            vectors = Narrowing(request, {})
            vectors.drop_foreign_extra(self._protocol_name)
            return self._openai_writer.encode_request(vectors.request)
        asked = self._adapt_request(request, {}).request
        if not all(isinstance(prompt, str) for prompt in asked.prompts):
            raise Unsupported("The model's workers take text, not token ids.", param="prompt")
        path, body = self._openai_writer.write_body(asked)
        self._adjust_body(body, asked)
        return WireRequest(f"{_ROOT}/{path}", _encode(body), _JSON)

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        complaint = partial(faults.complain, judge=meaning)
        if isinstance(request, EmbedRequest):
            return VectorDecoder(request, complaint=complaint)
        asked = self._adapt_request(request, {}).request
        echoes = self._openai_writer.expects_echo(asked)
        return AnswerDecoder(asked, echoes=echoes, complaint=complaint)

    # --- requests ---------------------------------------------------------------------------------

    def _adapt_request(
        self, request: GenerateRequest, names: Mapping[str, str]
    ) -> Narrowing[GenerateRequest]:
        """What of the request this server can be asked."""
        narrow = Narrowing(request, names)
        narrow.drop_foreign_extra(self._protocol_name)
        alone(narrow)
        narrow.drop_fields("sampling.logit_bias")
        if (seed := request.sampling.seed) is not None and seed >= SEEDS:
            narrow.report("sampling.seed", "approximated", f"{seed} to {seed % SEEDS}")
            narrow.set_field("sampling.seed", seed % SEEDS)
        _narrow_beams(narrow)
        if self._early:
            _narrow_early(narrow)
        else:
            _narrow_today(narrow)
        if request.want.usage == "each":
            narrow.set_field("want.usage", "final")
        return narrow

    def _adjust_body(self, body: dict[str, Any], asked: GenerateRequest) -> None:
        """What the parameters of one field alone can't say."""
        if not is_chat(asked) and "logprobs" in body:
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


def _narrow_beams(narrow: Narrowing[GenerateRequest]) -> None:
    """Beam search is never streamed; several answers are the best of as many beams, or more."""
    if narrow.request.stream:
        narrow.drop_fields("sampling.beam_width", detail="not with a stream")
    width = narrow.request.sampling.beam_width
    if width is not None:
        narrow.drop_fields(*_WITH_BEAMS, detail="not with beam search")
    if (narrow.request.n or 1) > min(width or 1, MOST_BEAMS):
        narrow.drop_fields("n", detail="without beam search")


def _narrow_today(narrow: Narrowing[GenerateRequest]) -> None:
    only_parts(narrow, _UNSEEN)
    if narrow.request.stream:
        without_logprobs(narrow, "not with a stream")
        if narrow.request.stopping.stop and not narrow.request.stopping.include_stop:
            narrow.report("stopping.stop", "approximated", "it stays in the text of a stream")


def _narrow_early(narrow: Narrowing[GenerateRequest]) -> None:
    only_parts(narrow, _EARLY_UNSEEN)
    without_logprobs(narrow)
    narrow.drop_fields("tools", "output")
    if any(message.tool_calls for message in narrow.request.messages):
        narrow.report("messages", "dropped", "tool calls")
    narrow.set_field("given", narrow.request.given - {"max_completion_tokens"})
    stopping = narrow.request.stopping
    if stopping.ignore_eos and (stopping.max_tokens or 0) > IGNORE_EOS_LIMIT:
        detail = f"{stopping.max_tokens} to {IGNORE_EOS_LIMIT}"
        narrow.report("stopping.max_tokens", "clamped", detail)
        narrow.set_field("stopping.max_tokens", IGNORE_EOS_LIMIT)


# --- errors ---------------------------------------------------------------------------------------

_SENTENCE: Final = re.compile(
    r"Mediapipe execution failed\. MP status - (?P<code>[A-Z_]+):\s*"
    r"(?:CalculatorGraph::Run\(\) failed:\s*)?"
    r'(?:Calculator::\w+\(\) for node "[^"]*" failed:\s*)?',
)
_NOT_JSON: Final = re.compile(r"The file is not valid json - ")
_TOO_LONG: Final = (
    re.compile(
        r"Number of prompt tokens: (\d+)(?: \+ max tokens value: \d+)?"
        r" exceeds model max length: (\d+)"
    ),
    re.compile(r"Input length exceeds pipeline capabilities: (\d+) > (\d+)"),
    re.compile(r"Input length (\d+) longer than allowed (\d+)"),
    re.compile(r"Input length exceeds the maximum allowed length()()"),
)
_STATUSES: Final[Mapping[str, int]] = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 400,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
}
"""Of what the graph says; anything else is the server's failure."""
_PATHS: Final = re.compile(r"Invalid request URL|Wrong endpoint")
_KEY: Final = "Unauthorized request due to invalid or missing api-key"


def meaning(status: int, fault: Fault, retry_after: float | None) -> GatewayError:
    """A ``protocols.openai.faults.Judge`` that takes the graph's sentence off what its node said.

    What the graph says inside an answer (status 0) is the server's failure, unless the prompt was
    too long: it checks a request before the first event.
    """
    text = fault.text
    if sentence := _SENTENCE.match(text):
        text = text[sentence.end() :]
        status = _STATUSES.get(sentence["code"], 500) if status else 500
    elif text == _KEY:
        status = 401
    elif status == 412:  # noqa: PLR2004 - its own for what it could not read
        text, status = _NOT_JSON.sub("", text), 400
    for pattern in _TOO_LONG:
        if found := pattern.search(text):
            tokens, limit = (int(one) if one else None for one in found.groups())
            return ContextTooLong(text, tokens=tokens, limit=limit)
    if _PATHS.match(text):
        error = WorkerFailed("The worker does not know the gateway's path.", status=status)
        error.add_note(f"the worker said: {text}")
        return error
    return faults.meaning(status, msgspec.structs.replace(fault, text=text), retry_after)

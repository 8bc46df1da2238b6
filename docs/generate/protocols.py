"""What each protocol reads from clients, what workers support of it, and how it reports errors."""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, cast

from msgspec import Raw, Struct, structs

from docs.generate.markdown import HEADER, code, number, prose, table
from gateway.emulation.planner import plan_emulation
from gateway.emulation.prompt_echo import strip_echo_and_suffix
from protocols.core import errors
from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    Endpoint,
    HasResponseHeaders,
    HttpResponse,
)
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    CACHE_KEY,
    AudioPart,
    ChoiceFormat,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    PromptOptions,
    ReasoningOptions,
    RegexFormat,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    VideoPart,
)
from protocols.core.request_headers import SILENT
from protocols.core.response_headers import DENIED, PASSED
from protocols.openai.hosted_apis import HostedApi
from protocols.params import Param, ParamTableProvider

_COLUMNS = ("parameter", "internal field", "type", "takes", "default", "null", "note")
_PARAMETERS_INTRO = """# Protocols

The parameters that each protocol accepts from clients. The tables list scalar parameters;
messages, prompts, tools and output formats are in the [last
section](#parameters-supported-by-workers). A parameter without an internal field is read together
with others, or forwarded unchanged. *default* is the value that the protocol promises to clients
that do not send the parameter. *null* says whether `null` counts as absent or is rejected
(*refused*).
"""


class ProtocolProfiles(Struct, frozen=True):
    """A protocol's adapter in each of its profiles, the default one first."""

    name: str
    profiles: Mapping[str, ClientAdapter]

    @property
    def default(self) -> ClientAdapter:
        """The adapter of the default profile."""
        return next(iter(self.profiles.values()))

    def tables(self) -> Iterator[tuple[str, str, tuple[Param, ...]]]:
        """Profile, kind and rows of each table."""
        for profile, adapter in self.profiles.items():
            assert isinstance(adapter, ParamTableProvider), self.name  # noqa: S101 - every adapter has tables
            for kind, rows in adapter.param_tables.items():
                yield profile, kind, rows


def parameters_page(protocols: Sequence[ProtocolProfiles]) -> str:
    """The parameters that each protocol reads from clients."""
    return "\n".join(
        [HEADER, "", _PARAMETERS_INTRO, *(_parameter_section(one) for one in protocols)]
    )


_STATEFUL_INTRO = """## Fields that later requests depend on

A client that names what a server keeps (a thread, an earlier response, a file) sends only what is
new. No target answers such a request as if it had the rest. *stored*: the gateway keeps it.
*forwarded*: workers of the same protocol get it unchanged, every other target refuses it.
*refused*: always. *reported*: the answer is the same without it, so that it is a loss like any
other. A field that the gateway does not know and whose name says that it continues an earlier
request (`previous_…_id`, `conversation_id`, `session`, `container`, …) is refused where a target
would not get it. So is one in a field that holds further ones, as Gemini's
`extra_body.google.cached_content`.
"""


def stateful_table(protocols: Sequence[ProtocolProfiles]) -> str:
    """The decision on each field that refers to what a server keeps."""
    names_by_row: dict[tuple[str, str, str], list[str]] = {}
    for protocol in protocols:
        for one in protocol.default.stateful_fields:
            row = (code(one.field), one.decision, one.reason)
            names_by_row.setdefault(row, []).append(protocol.name)
    rows = ((", ".join(names), *row) for row, names in names_by_row.items())
    return _STATEFUL_INTRO + "\n" + table(("protocol", "field", "decision", "why"), rows)


_HEADERS_INTRO = """## Headers of requests

The headers that say something to a server of the client's protocol. *forwarded*: workers of the
same protocol get it if the request is passed through, and it is reported otherwise. *reported*: no
worker gets it. *handled*: by the gateway, or it says nothing to a model. Any other name is
reported, as `header.NAME` in `x-interlingua-loss`, and no worker gets it: it may be one by which a
proxy before the worker knows its users or selects a machine. A header is **never a
reason to refuse**, not even with `on_loss: reject`: it allows features or names an account, and
clients send it with every request, whether it needs that or not (Claude Code sends
`anthropic-beta`). Headers by which the configuration routes requests, and those of the last rows,
are *silent*: no loss. The `headers` of a worker in the configuration replace those of clients.

The id and the time **in** an answer are the worker's for clients of its protocol, whether the
answer is passed through or written anew. Clients of other protocols get the gateway's, and so do
they where the gateway looks an answer up by its id: stored responses, and MindIE's answers, by
whose id a client stops the request. Every answer has the gateway's id of the request in the header
`x-request-id`. Feedback takes either.

Of a worker's event stream, clients get the events, with the names that their protocol has.
Comments, `id:` and `retry:` are framing of the worker's connection and end at the gateway, since it
resumes no stream.
"""


_RESPONSE_HEADERS_INTRO = """## Headers of responses

Of the head of a worker's response, clients of the worker's protocol get what belongs to its API, of
whole answers, streams and errors, at most 8 KiB: the worker's `request-id`, rate limits, durations
and version in place of the gateway's, and unknown names that begin as those. The limits of the
client's own key win where it has any, and so do the gateway's `Retry-After`, which is the shortest
of all workers, and `x-request-id`. Clients of other protocols get the gateway's own: rate limits,
ids and organizations are the state of a worker or of an account there, and no part of an answer.
They get a report (`response.header.NAME`) of an unknown name with a protocol's prefix.
"""


def response_header_table(protocols: Sequence[ProtocolProfiles]) -> str:
    """The decision on each header of workers' responses."""
    rows: list[tuple[str, tuple[str, ...], str, str]] = [("all", PASSED, "passed on", "")]
    for protocol in protocols:
        if isinstance(protocol.default, HasResponseHeaders):
            headers = protocol.default.response_headers
            rows.append((protocol.name, headers.passed, "passed on", ""))
            rows.append((protocol.name, headers.state, "no loss for others", "state"))
    rows += [("all", names, "never passed on", reason) for reason, names in DENIED.items()]
    shown = ((name, ", ".join(map(code, names)), *rest) for name, names, *rest in rows)
    return _RESPONSE_HEADERS_INTRO + "\n" + table(("protocol", "header", "decision", "why"), shown)


def header_table(protocols: Sequence[ProtocolProfiles]) -> str:
    """The decision on each header of requests."""
    silent = [
        ("all", ", ".join(map(code, names)), f"silent: {reason}")
        for reason, names in SILENT.items()
    ]
    rows = (
        (protocol.name, code(name), decision)
        for protocol in protocols
        for table_of_headers in (protocol.default.request_headers,)
        for name, decision in (
            *table_of_headers.decisions.items(),
            *((f"{prefix}*", "reported") for prefix in table_of_headers.prefixes),
        )
    )
    return _HEADERS_INTRO + "\n" + table(("protocol", "header", "decision"), [*rows, *silent])


_HOSTED_INTRO = """## Hosted APIs

Each is a profile of `openai` for workers ([how to](../howto/hosted-apis.md)). *lacks*: not sent,
and reported, unless the gateway does it. *partly*: sent, and reported as approximated unless the
value is the API's own. *adds*:
parameters of every client. *own fields*: forwarded from OpenAI clients.
"""


def hosted_api_table(apis: Mapping[str, HostedApi]) -> str:
    """What each hosted API does differently from OpenAI's, with the sources."""
    head = ("profile", "URL", "lacks", "partly", "adds", "own fields", "other", "sources")
    rows = (
        (
            code(name),
            code(api.url),
            *(
                ", ".join(map(code, names))
                for names in (sorted(api.lacks), sorted(api.lacks_partly), api.adds, api.forwards)
            ),
            "; ".join(_list_api_differences(api)),
            f"{' '.join(api.sources)}, read on {api.read}",
        )
        for name, api in apis.items()
    )
    return _HOSTED_INTRO + "\n" + table(head, rows)


_NAMES_OF_OBJECTS: Final[Mapping[type[Struct], str]] = {TextPart: "texts", Tool: "tools"}


def _list_api_differences(api: HostedApi) -> Iterator[str]:
    yield from (f"{code(name)} is {code(wire)}" for name, wire in api.renames.items())
    if api.max_stop_strings is not None:
        yield f"at most {api.max_stop_strings} stop strings"
    if api.max_top_logprobs is not None:
        yield f"{code('top_logprobs')} up to {api.max_top_logprobs}"
    match api.earlier_reasoning:
        case "refused":
            yield "takes no earlier reasoning"
        case key:
            yield f"earlier reasoning as {code(key)}"
    yield from (
        f"{code('reasoning_effort')} {code(word)} is {code(other)}"
        for word, other in api.replaced_efforts.items()
    )
    if api.marked_for_cache:
        names = ", ".join(_NAMES_OF_OBJECTS[one] for one in api.marked_for_cache)
        yield f"{code(CACHE_KEY)} of every client in {names} and the request"
    if api.short_call_ids:
        yield "ids of tool calls have nine letters and digits"
    if not api.developer_role:
        yield f"{code('developer')} is {code('system')}"
    if not api.json_schema:
        yield "no JSON Schema"


def _parameter_section(protocol: ProtocolProfiles) -> str:
    """The section of one protocol; equal tables appear once."""
    groups: list[tuple[tuple[Param, ...], dict[str, list[str]]]] = []
    for profile, kind, rows in protocol.tables():
        kinds = next((kinds for table_rows, kinds in groups if table_rows == rows), None)
        if kinds is None:
            groups.append((rows, kinds := {}))
        kinds.setdefault(kind, []).append(profile)
    default, *others = map(code, protocol.profiles)
    profiles = ", ".join([f"{default} (the default)", *others])
    lines = [
        f"## {protocol.name}",
        "",
        prose(type(protocol.default)),
        "",
        f"Profiles: {profiles}.",
        "",
    ]
    for rows, kinds in groups:
        lines += [
            _heading(protocol, kinds),
            "",
            _endpoints(protocol, kinds),
            "",
            table(_COLUMNS, map(parameter_row, rows)),
        ]
    return "\n".join(lines)


def _heading(protocol: ProtocolProfiles, kinds: Mapping[str, Sequence[str]]) -> str:
    profiles = list(dict.fromkeys(one for several in kinds.values() for one in several))
    every = len(profiles) == len(protocol.profiles)
    names = ", ".join(kind.replace("_", " ") for kind in kinds)
    return f"### {protocol.name}: {names}" + ("" if every else f" ({', '.join(profiles)})")


def _endpoints(protocol: ProtocolProfiles, kinds: Mapping[str, Sequence[str]]) -> str:
    variants = {kind.partition(",")[0] for kind in kinds}
    return ", ".join(code(f"{one.method} {one.path}") for one in _endpoints_of(protocol, variants))


def _endpoints_of(protocol: ProtocolProfiles, variants: set[str]) -> list[Endpoint]:
    return [one for one in protocol.default.endpoints if one.operation in variants]


def parameter_row(param: Param) -> tuple[str, ...]:
    """A row of the page."""
    internal = "" if param.field.startswith(("request.", "extra.")) else param.field
    return (
        code(param.wire),
        code(internal),
        param.type,
        "; ".join(_limits(param)),
        "" if param.default is None else code(_value(param.default)),
        "absent" if param.nullable else "refused",
        param.description,
    )


def _limits(param: Param) -> Iterator[str]:
    low = None if param.minimum is None else number(param.minimum)
    high = None if param.maximum is None else number(param.maximum)
    match low, high:
        case None, None:
            pass
        case _, None:
            yield f"{'above' if param.exclusive_minimum else 'from'} {low}"
        case None, _:
            yield f"{'below' if param.exclusive_maximum else 'up to'} {high}"
        case _:
            start = "above" if param.exclusive_minimum else "from"
            yield f"{start} {low} {'to below' if param.exclusive_maximum else 'to'} {high}"
    if param.choices:
        yield "one of " + ", ".join(map(code, param.choices))
    if param.disabled_values:
        yield " and ".join(map(number, param.disabled_values)) + " for off"
    if param.min_items:
        yield f"at least {param.min_items} items"
    if param.max_items is not None:
        yield f"at most {param.max_items} items"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


# --- what workers support -------------------------------------------------------------------------


_FAR: Final = 10**9
_WORKERS_INTRO = """## Parameters supported by workers

The left columns show the name of each field in the client protocols, over all endpoints and
profiles; an empty cell means that clients can't send it (the parts of `messages` have no names of
their own). The columns with an arrow show what each kind of worker gets; chat requests and
prompts are shown separately if they differ.

- *carried*: sent to the worker.
- *clamped*: sent within these limits.
- *clamped*, *approximated* and *dropped* parameters are listed in `x-interlingua-loss`, or the
  request is rejected, depending on `on_loss`.
- *by the gateway*: the gateway emulates it.
- *refused*: the request is rejected, because such a worker can't serve it.
"""
_SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "sampling": SamplingParams,
    "stopping": StopConditions,
    "logprobs": LogprobsOptions,
    "reasoning": ReasoningOptions,
    "templating": PromptOptions,
    "response_options": ResponseOptions,
}
_EXCLUDED: Final = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "provided_fields", "client_id",
     "labels", "extra", "field_extra", "source", "timeout", "encoding", "tools", "tool_choice",
     "legacy_functions", "output", "templating.mode", "response_options.usage",
     "response_options.details", "response_options.timing", *_SECTIONS}
)  # fmt: skip
"""Fields that concern no worker, and those that have samples below."""
EMULATED: Final = "by the gateway"
REFUSED: Final = "refused"
_SAMPLES: Final[Mapping[str, Any]] = {
    "n": 2,  # 1 is what every worker does
    "stopping.overflow": "truncate",
    "overflow": "truncate",
    "reasoning.effort": "low",
    "sampling.beam_width": 2,
}

Path = str
Kind = Literal["chat", "completion"]


class LossReporter(Protocol):
    """Reports the losses of a request: an upstream adapter or a backend."""

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces``."""


class FieldSample(Struct, frozen=True):
    """A request that sets one field, in one of its shapes, and nothing else."""

    path: Path
    shape: str
    request: Request
    numeric: bool = False

    @property
    def base(self) -> GenerationRequest:
        """The same request without the field."""
        assert isinstance(self.request, GenerationRequest)  # noqa: S101 - as of generate_samples
        holder = self.path.partition(".")[0]
        unset = getattr(
            _base("completion" if self.request.kind == "completion" else "chat"), holder
        )
        return structs.replace(self.request, **{holder: unset})


def worker_tables(
    protocols: Sequence[ProtocolProfiles], reporters: Mapping[str, LossReporter]
) -> str:
    """What workers support: a table for text, and one for embeddings."""
    client_names = {one.name: list_client_names(one) for one in protocols}
    head = ("field", *(one.name for one in protocols), *(f"→ {name}" for name in reporters))
    text = _by_label([*generate_samples("chat"), *generate_samples("completion")])
    vectors = _by_label(_embedding())
    return "\n".join(
        [
            _WORKERS_INTRO,
            table(head, (_field_row(samples, client_names, reporters) for samples in text)),
            "### Embeddings\n",
            table(head, (_field_row(samples, client_names, reporters) for samples in vectors)),
        ]
    )


def _by_label(samples: Iterable[FieldSample]) -> Sequence[Sequence[FieldSample]]:
    groups: dict[tuple[Path, str], list[FieldSample]] = {}
    for sample in samples:
        groups.setdefault((sample.path, sample.shape), []).append(sample)
    return list(groups.values())


def _field_row(
    samples: Sequence[FieldSample],
    client_names: Mapping[str, Mapping[Path, str]],
    reporters: Mapping[str, LossReporter],
) -> list[str]:
    first = samples[0]
    label = code(first.path) + (f": {first.shape}" if first.shape else "")
    clients = [names.get(first.path, "") for names in client_names.values()]
    return [label, *clients, *(_support(samples, one) for one in reporters.values())]


def list_client_names(protocol: ProtocolProfiles) -> Mapping[Path, str]:
    """The names of each field in the protocol."""
    wires: dict[Path, dict[str, None]] = {}
    for _, _, rows in protocol.tables():
        for param in rows:
            wires.setdefault(param.field, {})[param.wire] = None
    for adapter in protocol.profiles.values():
        for endpoint in adapter.endpoints:
            if endpoint.task == "generate":
                for path, wire in _names(adapter.field_names, endpoint).items():
                    wires.setdefault(path, {})[wire] = None
    return {path: ", ".join(map(code, several)) for path, several in wires.items()}


def _names(names: Any, endpoint: Endpoint) -> Mapping[Path, str]:
    """The names at one endpoint; empty if the adapter reads them only from a valid request."""
    call = ClientRequest(endpoint, {}, {}, "", b"{}", endpoint.path)
    try:
        by_path: Mapping[Path, str] = names(call)
    except GatewayError:
        return {}
    return by_path


# --- the samples ---------------------------------------------------------------------------------


def generate_samples(kind: Kind) -> Iterator[FieldSample]:
    base = _base(kind)
    for name, (value, numeric) in _values(GenerationRequest, ""):
        yield FieldSample(name, "", structs.replace(base, **{name: value}), numeric)
    for holder, struct in _SECTIONS.items():
        for path, (value, numeric) in _values(struct, f"{holder}."):
            filled = struct(**{path.rpartition(".")[2]: value})
            yield FieldSample(path, "", structs.replace(base, **{holder: filled}), numeric)
    formats: Mapping[str, Any] = {
        "a JSON object": JsonObjectFormat(),
        "a JSON Schema": JsonSchemaFormat(Raw(b"{}")),
        "a regular expression": RegexFormat("x"),
        "a choice": ChoiceFormat(("x",)),
        "a grammar": GrammarFormat("x"),
    }
    for shape, output in formats.items():
        yield FieldSample("output", shape, structs.replace(base, output=output))
    if kind == "chat":
        yield from _conversation(base)


def _conversation(base: GenerationRequest) -> Iterator[FieldSample]:
    function = (Tool("x"),)
    yield FieldSample("tools", "functions", structs.replace(base, tools=function))
    forced = structs.replace(base, tools=function, tool_choice="required")
    yield FieldSample("tool_choice", "one must be called", forced)
    parts: Mapping[str, Any] = {
        "images": ImagePart("data:,"),
        "audio": AudioPart(""),
        "video": VideoPart("data:,"),
        "files": FilePart("x"),
    }
    for shape, part in parts.items():
        yield FieldSample(
            "messages", shape, structs.replace(base, messages=(Message("user", (part,)),))
        )


def _embedding() -> Iterator[FieldSample]:
    base = EmbeddingRequest(model="m", inputs=("x",))
    for name, (value, numeric) in _values(EmbeddingRequest, ""):
        yield FieldSample(name, "", structs.replace(base, **{name: value}), numeric)


def _base(kind: Kind) -> GenerationRequest:
    if kind == "chat":
        return GenerationRequest(
            model="m", kind=kind, messages=(Message("user", (TextPart("x"),)),)
        )
    return GenerationRequest(
        model="m", kind=kind, prompts=("x",), templating=PromptOptions(mode="raw")
    )


def _values(struct: type[Struct], before: str) -> Iterator[tuple[Path, tuple[Any, bool]]]:
    """A value for each field that a worker may carry, and whether it is a number."""
    for name, hint in typing.get_type_hints(struct).items():
        if (path := before + name) in _EXCLUDED:
            continue
        sample = _SAMPLES[path] if path in _SAMPLES else _sample(hint)
        yield path, (sample, type(sample) in (int, float))


def _sample(hint: Any) -> Any:
    """A value of this type that is not its default."""
    simple: Mapping[Any, Any] = {int: 1, float: 0.5, bool: True, str: "x"}
    if hint in simple:
        return simple[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return (_sample(inner[0]),)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"x" if inner[0] is str else 1: Raw(b"1") if inner[1] is Raw else 1.0}
    return _sample(inner[0])


# --- what becomes of them ------------------------------------------------------------------------


def _support(samples: Sequence[FieldSample], reporter: LossReporter) -> str:
    support = {_kind(sample): find_support(sample, reporter) for sample in samples}
    if len(set(support.values())) == 1:
        return next(iter(support.values()))
    return "; ".join(f"{kind}: {level}" for kind, level in support.items())


def _kind(sample: FieldSample) -> str:
    chat = isinstance(sample.request, GenerationRequest) and sample.request.kind == "chat"
    return "chat" if chat else "prompts"


def find_support(sample: FieldSample, reporter: LossReporter) -> str:
    stripped, emulated = strip_echo_and_suffix(sample.request)
    inner = cast("Request", stripped)
    if emulated is not None and inner != sample.request:
        return EMULATED
    try:
        loss = _find_loss(inner, sample.path, reporter)
    except ClientError:
        return REFUSED
    if loss is not None:
        return EMULATED if loss.reason == "emulated" else loss.reason
    if not sample.numeric:
        return "carried"
    match _limit(sample, -_FAR, reporter), _limit(sample, _FAR, reporter):
        case "", "":
            return "carried"
        case low, "":
            return f"clamped from {low}"
        case "", high:
            return f"clamped to {high}"
        case low, high:
            return f"clamped from {low} to {high}"


def _limit(sample: FieldSample, value: int, reporter: LossReporter) -> str:
    """The limit to which an extreme value is clamped; "" if it is not."""
    loss = _find_loss(_with(sample, value), sample.path, reporter)
    if loss is None or loss.reason != "clamped":
        return ""
    return number(float(loss.detail.rpartition(" ")[2]))


def _with(sample: FieldSample, value: int) -> Request:
    holder, _, name = sample.path.rpartition(".")
    if not holder:
        return structs.replace(sample.request, **{name: value})
    part = structs.replace(getattr(sample.request, holder), **{name: value})
    return structs.replace(sample.request, **{holder: part})


def _find_loss(request: Request, path: Path, reporter: LossReporter) -> UnsupportedParameter | None:
    """The loss of this path, for a client that names every field by its path."""
    names = {one: one for one in (path, *_EXCLUDED)}
    losses = plan_emulation(
        request, reporter.unsupported_parameters(request, names)
    ).unsupported_parameters
    return next((loss for loss in losses if path in (loss.field, loss.path)), None)


# --- errors ---------------------------------------------------------------------------------------


_ERRORS_INTRO = """# Errors

The error classes of the gateway, and how each protocol reports them. *retryable*: the client may
send the same request again. The tables show the status and body before a response has started; in
a stream that has started, the error is the last event.
"""
_MESSAGE: Final = "MESSAGE"
_ARGUMENTS: Final[Mapping[str, Any]] = {
    "param": "FIELD",
    "model": "MODEL",
    "version": "2",
    "id": "ID",
    "allowed": ("POST",),
    "limit": 1024,
    "missing": True,
    "retry_after": 2.0,
    "method": "POST",
    "path": "/PATH",
}
"""By a parameter's name: what an error's constructor is given."""
_PARAM: Final = re.compile(r"\{(\w+)\}")


def errors_page(protocols: Sequence[ProtocolProfiles]) -> str:
    """The errors, and how each protocol reports them."""
    kinds = list(_error_classes(GatewayError))
    drawing = (errors.__doc__ or "").split("\n\n")[1]
    lines = [HEADER, "", _ERRORS_INTRO, "```text", drawing, "```", ""]
    lines += [table(("error", "caused by", "retryable", "meaning"), map(_error_meaning, kinds))]
    for one in protocols:
        lines += [
            f"## {one.name}",
            "",
            _error_heading(one.default),
            _error_table(one.default, kinds),
        ]
    return "\n".join(lines)


def _error_classes(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    """The classes that are raised, parents first, without the abstract ones."""
    gathers = kind in (GatewayError, errors.ClientError, errors.WorkerError)
    if not gathers:
        yield kind
    for child in kind.__subclasses__():
        yield from _error_classes(child)


def _error_meaning(kind: type[GatewayError]) -> tuple[str, ...]:
    meaning = " ".join(prose(kind).split())
    return code(kind.__name__), kind.origin, "yes" if kind.retryable else "no", meaning


def _error_heading(adapter: ClientAdapter) -> str:
    call = _sample_call(adapter)
    return f"Responses to {code(f'{call.endpoint.method} {call.endpoint.path}')}:\n"


def _error_table(adapter: ClientAdapter, kinds: Sequence[type[GatewayError]]) -> str:
    replies = {
        kind: adapter.encode_error(_build_error(kind), _sample_call(adapter)) for kind in kinds
    }
    shared = set.intersection(*(set(reply.headers) for reply in replies.values()))
    head = ("error", "status", "body", "headers")
    return table(head, (_error_row(kind, reply, shared) for kind, reply in replies.items()))


def _error_row(
    kind: type[GatewayError], reply: HttpResponse, shared: set[tuple[str, str]]
) -> tuple[str, ...]:
    headers = ", ".join(code(f"{n}: {v}") for n, v in reply.headers if (n, v) not in shared)
    body = reply.body.decode().replace("\n", " ")
    return code(kind.__name__), str(reply.status), code(body), headers


def _sample_call(adapter: ClientAdapter) -> ClientRequest:
    """A call of the first endpoint that generates."""
    endpoint = next(one for one in adapter.endpoints if one.task == "generate")
    params = dict.fromkeys(_PARAM.findall(endpoint.path), "MODEL")
    path = _PARAM.sub("MODEL", endpoint.path)
    return ClientRequest(endpoint, params, {}, "", b"{}", path, id="ID")


def _build_error(kind: type[GatewayError]) -> GatewayError:
    """An error of this class, with whatever it may carry."""
    parameters = inspect.signature(kind).parameters
    return kind(_MESSAGE, **{name: _ARGUMENTS[name] for name in parameters if name in _ARGUMENTS})

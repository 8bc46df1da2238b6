"""Deployments: the entries of the model list of LiteLLM's proxy.

What they may hold: docs.litellm.ai/docs/proxy/config_settings.
"""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gateway.config.validate_pools import RESERVED_HEADERS
from gateway.tools.migrate.providers import (
    ORGANIZATION_HEADERS,
    Provider,
    list_tasks,
    resolve_endpoint,
)
from gateway.tools.migrate.yaml_file import (
    Env,
    EnvText,
    NoteCollector,
    SourceMapping,
    SourceValue,
    UnsupportedEntry,
    describe_value,
    read_duration,
    read_integer,
    read_number,
    read_text,
)
from protocols.core import units

WEIGHT_KEYS: Final = ("weight", "rpm", "tpm")
"""The keys by which LiteLLM weights deployments: the first that the first deployment has."""
_SECRET_NAME: Final = re.compile(r"auth|cookie|key|secret|token", re.IGNORECASE)
"""Names of headers whose values may be secrets."""

_NO_KEYS: Final = frozenset(
    {"anything", "dummy", "empty", "fake", "fake-key", "na", "no-key", "none", "not-needed", "x"}
)
_EMBEDS: Final = re.compile(r"embed|\b(bge|gte|e5)-")
_TASKS: Final = {"chat": "chat", "completion": "chat", "embedding": "embedding", "rerank": "rerank"}
_FORWARDED_MODES: Final = frozenset(
    {"audio_speech", "audio_transcription", "image_edit", "image_generation", "moderation"}
)
"""Modes whose requests are forwarded to workers without translation."""

_PARAM_REASONS: Final = {
    "api_version": "the provider's API has no such versions",
    "tags": "write a rule under `routes` for these requests",
    "region_name": "regions are not supported",
    "max_budget": "prices are not supported",
    "budget_duration": "prices are not supported",
    "seed": "only a request sets its seed",
    "stop": "only a request sets its stop strings",
    "drop_params": "set `on_loss` of the model",
}
_NEEDLESS_PARAMS: Final = {
    "use_in_pass_through": "requests pass through unchanged by default",
    "merge_reasoning_content_in_choices": "reasoning stays where the client's protocol has it",
}
_INFO_REASONS: Final = {"access_groups": "list the models of each key under `keys`"}
_UNUSED_PROPERTY: Final = "this property of a model is not used"


HeaderText = str | Env | EnvText


class SourceWorker(Struct, frozen=True):
    """The endpoint of a deployment. ``shares`` are its weights by WEIGHT_KEYS."""

    url: str | Env | EnvText
    key: Env | None
    shares: Mapping[str, float]
    max_concurrency: int | None
    occurrences: int = 1
    """How often the list has this endpoint."""
    key_header: str | None = None
    """The header of the key; None: ``Authorization``, as a bearer token."""
    headers: Mapping[str, HeaderText] = {}
    """Headers of each request."""


class PoolKey(Struct, frozen=True):
    """What workers of one pool have in common. ``script`` is the text of a mock response."""

    protocol: str
    profile: str | None
    model: str | None
    total: str | None
    first_token: str | None
    retries: int | None
    order: int
    script: str | None = None
    api_version: str | Env | None = None


class SourceNumber(Struct, frozen=True):
    """A number of the file."""

    value: float
    source: SourceValue


class Deployment(Struct, frozen=True):
    """An entry of the model list. ``source`` is its position."""

    pool_key: PoolKey
    worker: SourceWorker
    task: str
    defaults: Mapping[str, float]
    numbers: Mapping[str, SourceNumber]
    """Its weight and its limits per minute, by WEIGHT_KEYS, and its ``order``. What becomes of them
    depends on the other deployments of its name."""
    comments: tuple[str, ...]
    source: SourceValue


class DeploymentReader:
    """Reads deployments.

    With ``by_rates``, their rate limits may count as weights.
    """

    def __init__(self, notes: NoteCollector, *, by_rates: bool) -> None:
        self.notes = notes
        self._by_rates = by_rates
        self._secrets: dict[str, str] = {}
        """The variables that replace secrets in the file, by secret."""

    def read(self, group: str, entry: SourceMapping, params: SourceMapping) -> Deployment:
        """Read an entry. Raises UnsupportedEntry."""
        notes, source = self.notes, entry.source
        script, model = params.pop("mock_response"), params.pop("model")
        if model is None or not model.text:
            raise UnsupportedEntry(model or source, "litellm_params has no model")
        task = _task(entry, model.text, notes)
        if script is not None and (text := read_text(script, notes, str)) is not None:
            return self._mocked(text, task, params, source)
        address = params.pop("api_base", "base_url")
        endpoint = resolve_endpoint(model, params.pop("custom_llm_provider"), address, notes)
        provider = endpoint.provider
        if task not in list_tasks(provider):
            reason = f"workers of the protocol {provider.protocol} do not have the task {task}"
            raise UnsupportedEntry(model, reason)
        max_concurrency = read_integer(params.pop("max_parallel_requests"), notes, 1, 100_000)
        headers = self._headers(group, params, provider)
        if (provider.key_header or "Authorization").lower() in map(str.lower, headers):
            key = None
            if (setting := params.pop("api_key")) is not None:
                notes.add(setting, "needless", "the entry's own header replaces it")
        else:
            key = self._key(group, params, provider, has_address=address is not None)
        numbers = self._numbers(params)
        if (order := params.pop("order")) is not None:
            rank = read_integer(order, notes, 0, 1000) or 0
            numbers["order"] = SourceNumber(rank, order)
        worker = SourceWorker(
            endpoint.url,
            key,
            self._shares(numbers),
            max_concurrency,
            key_header=provider.key_header,
            headers=headers,
        )
        is_prefix = group.endswith("*") and group != "*"
        pool_key = PoolKey(
            protocol=provider.protocol,
            profile=provider.profile,
            model=None if endpoint.model == "*" and not is_prefix else endpoint.model,
            total=read_duration(params.pop("timeout", "request_timeout"), notes),
            first_token=read_duration(params.pop("stream_timeout"), notes),
            retries=read_integer(params.pop("max_retries", "num_retries"), notes, 0, 10),
            order=int(numbers["order"].value) if "order" in numbers else 0,
            api_version=_api_version(params, provider, notes),
        )
        defaults = _defaults(params, notes)
        params.note_unused(notes, "no such setting", _PARAM_REASONS, _NEEDLESS_PARAMS)
        return Deployment(
            pool_key=pool_key,
            worker=worker,
            task=task,
            defaults=defaults,
            numbers=numbers,
            comments=endpoint.comments,
            source=source,
        )

    def _mocked(
        self, response: str, task: str, params: SourceMapping, source: SourceValue
    ) -> Deployment:
        """A deployment that always gives the same answer."""
        numbers = self._numbers(params)
        worker = SourceWorker("", None, self._shares(numbers), None)
        pool_key = PoolKey(
            protocol="",
            profile=None,
            model=None,
            total=None,
            first_token=None,
            retries=None,
            order=0,
            script=response,
        )
        params.note_unused(self.notes, "a mock response does not use it", {}, {})
        return Deployment(
            pool_key=pool_key,
            worker=worker,
            task=task,
            defaults={},
            numbers=numbers,
            comments=(),
            source=source,
        )

    def _key(
        self, group: str, params: SourceMapping, provider: Provider, *, has_address: bool
    ) -> Env | None:
        """The variable for a worker's key, also if the file has the key itself."""
        setting = params.pop("api_key")
        if setting is None:
            has_default = provider.key is not None and (not has_address or provider.keyed)
            return Env(str(provider.key)) if has_default else None
        value = setting.value
        if isinstance(value, Env):
            return value
        if not isinstance(value, str) or value.lower() in _NO_KEYS:
            self.notes.add(setting, "needless", "not a real key; the workers get none")
            return None
        return self._replace_secret(setting, value, group)

    def _replace_secret(self, setting: SourceValue, secret: str, group: str) -> Env:
        """The variable that replaces a secret in the file."""
        name = self._secrets.get(secret)
        if name is None:
            base = re.sub(r"[^A-Z0-9]+", "_", group.upper()).strip("_") or "WORKER"
            similar = [
                variable
                for variable in self._secrets.values()
                if variable.startswith(f"KEY_OF_{base}")
            ]
            name = f"KEY_OF_{base}" + (f"_{len(similar) + 1}" if similar else "")
            self._secrets[secret] = name
        self.notes.add(
            setting, "changed", f"a secret; it is now read from the environment: set {name}"
        )
        return Env(name)

    def _headers(
        self, group: str, params: SourceMapping, provider: Provider
    ) -> Mapping[str, HeaderText]:
        """The headers of each request; values that may be secrets become variables."""
        headers: dict[str, HeaderText] = {}
        organization = params.pop("organization")
        if organization is not None:
            if (header := ORGANIZATION_HEADERS.get(provider.protocol)) is not None:
                headers[header] = organization.value
            else:
                self.notes.add(organization, "left out", "the provider has no organizations")
        for setting in (params.pop("headers"), params.pop("extra_headers")):
            for name, source in () if setting is None else setting.mapping().items():
                if (text := self._header(group, name, source)) is not None:
                    headers[name] = text
        return headers

    def _header(self, group: str, name: str, source: SourceValue) -> HeaderText | None:
        value = source.value
        if isinstance(value, Env | EnvText):
            return value
        text = value if isinstance(value, str) else str(value)
        try:
            units.parse_header_name(name)
            units.parse_header_value(text)
        except ValueError as error:
            self.notes.add(source, "left out", f"{error}")
            return None
        if name.lower() in RESERVED_HEADERS:
            self.notes.add(source, "left out", "the gateway sets this header itself")
            return None
        return self._replace_secret(source, text, group) if _SECRET_NAME.search(name) else text

    def _numbers(self, params: SourceMapping) -> dict[str, SourceNumber]:
        numbers = {}
        for key in WEIGHT_KEYS:
            setting = params.pop(key)
            number = read_number(setting, self.notes, 0, 1e12)
            if setting is not None and number is not None:
                numbers[key] = SourceNumber(number, setting)
        return numbers

    def _shares(self, numbers: Mapping[str, SourceNumber]) -> Mapping[str, float]:
        keys = WEIGHT_KEYS if self._by_rates else ("weight",)
        return {key: numbers[key].value for key in keys if key in numbers}


def _api_version(
    params: SourceMapping, provider: Provider, notes: NoteCollector
) -> str | Env | None:
    """The version of Azure's API."""
    if provider.profile != "azure" or (setting := params.pop("api_version")) is None:
        return None
    value = setting.value
    return value if isinstance(value, Env) else read_text(setting, notes, str)


def _task(entry: SourceMapping, model: str, notes: NoteCollector) -> str:
    """Raises UnsupportedEntry."""
    info = entry.pop("model_info")
    mode = None
    if info is not None:
        properties = info.mapping()
        mode = properties.pop("mode")
        properties.note_unused(
            notes, _UNUSED_PROPERTY, _INFO_REASONS, {"id": "versions have names of their own"}
        )
    if mode is None:
        if not _EMBEDS.search(model.lower()):
            return "chat"
        reason = "taken for an embedding model, by its name; if it is not one, remove the task"
        notes.add(entry.source, "changed", reason)
        return "embedding"
    if mode.text in _FORWARDED_MODES:
        notes.add(mode, "changed", "its requests are forwarded to the worker without translation")
        return "chat"
    task = _TASKS.get(mode.text)
    if task is None:
        raise UnsupportedEntry(mode, f"the mode {describe_value(mode.value)} is not supported")
    return task


def _defaults(params: SourceMapping, notes: NoteCollector) -> Mapping[str, float]:
    """The model's defaults for parameters of requests."""
    defaults: dict[str, float | None] = {
        "temperature": read_number(params.pop("temperature"), notes, 0, 2),
        "top_p": read_number(params.pop("top_p"), notes, 1e-6, 1),
        "top_k": read_integer(params.pop("top_k"), notes, 1, 1_000_000),
        "max_tokens": read_integer(params.pop("max_tokens"), notes, 1, 1_000_000_000),
    }
    return {key: value for key, value in defaults.items() if value is not None}

"""One entry of LiteLLM's ``model_list``: who answers for a model, where, and how."""

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from gateway.tools.migrate import reading
from gateway.tools.migrate.origins import Origin
from gateway.tools.migrate.places import place
from gateway.tools.migrate.source import Env, Given, LeftOut, Notes, Part

WEIGHTS: Final = ("weight", "rpm", "tpm")
"""By which the other one shares a model's requests out: the first that its first entry has."""

_NO_KEYS: Final = frozenset(
    {"anything", "dummy", "empty", "fake", "fake-key", "na", "no-key", "none", "not-needed", "x"}
)
_EMBEDS: Final = re.compile(r"embed|\b(bge|gte|e5)-")
_TASKS: Final = {"chat": "chat", "completion": "chat", "embedding": "embedding"}

_WHYS: Final = {
    "api_version": "nothing that is carried over has versions of its API",
    "extra_headers": "workers get no headers of the configuration's",
    "headers": "workers get no headers of the configuration's",
    "organization": "workers get no headers of the configuration's",
    "tags": "write a rule under `routes` for the requests that are meant",
    "region_name": "there are no regions",
    "max_budget": "there are no prices",
    "budget_duration": "there are no prices",
    "seed": "a request's seed is its client's",
    "stop": "a request's stop strings are its client's",
    "drop_params": "say `on_loss` of the model",
}
_NEEDLESS: Final = {
    "use_in_pass_through": "what needs no change passes through by itself",
    "merge_reasoning_content_in_choices": "reasoning stays where the client's dialect has it",
}
_INFO_WHYS: Final = {"access_groups": "list the models of each key under `keys`"}
_OF_INFO: Final = "it is said of the model, and nothing here asks for it"


class Worker(Struct, frozen=True):
    """A place that answers. ``shares`` are the numbers by which requests are shared out."""

    url: str | Env
    key: Env | None
    shares: Mapping[str, float]
    most: int | None
    twice: int = 1
    """How often it is in the list."""


class Kind(Struct, frozen=True):
    """What workers must have in common to be in one pool. ``script``: what is answered always."""

    dialect: str
    profile: str | None
    model: str | None
    total: str | None
    first_token: str | None
    retries: int | None
    order: int
    script: str | None = None


class Member(Struct, frozen=True):
    """An entry. ``at`` is where it stands."""

    kind: Kind
    worker: Worker
    task: str
    defaults: Mapping[str, float]
    comments: tuple[str, ...]
    at: Given


class Members:
    """Reads them. With ``by_rates`` the other one's rates count as weights."""

    def __init__(self, notes: Notes, *, by_rates: bool) -> None:
        self.notes = notes
        self._by_rates = by_rates
        self._secrets: dict[str, str] = {}
        """The variables that take the place of secrets in the file, by the secret."""

    def read(self, group: str, entry: Part, params: Part) -> Member:
        """What an entry comes to. Raises LeftOut where nobody here can answer for it."""
        notes, at = self.notes, entry.given
        script, model = params.take("mock_response"), params.take("model")
        if model is None or not model.text:
            raise LeftOut(model or at, "litellm_params names no model")
        task = _task(entry, model.text, notes)
        if script is not None and (told := reading.checked(script, notes, str)) is not None:
            return self._mocked(told, task, params, at)
        where = params.take("api_base", "base_url")
        found = place(model, params.take("custom_llm_provider"), where, notes)
        origin = found.origin
        most = reading.whole(params.take("max_parallel_requests"), notes, 1, 100_000)
        key = self._key(group, params, origin, placed=where is not None)
        worker = Worker(found.url, key, self._shares(params), most)
        kind = Kind(
            origin.dialect,
            origin.profile,
            found.model,
            reading.seconds(params.take("timeout", "request_timeout"), notes),
            reading.seconds(params.take("stream_timeout"), notes),
            reading.whole(params.take("max_retries", "num_retries"), notes, 0, 10),
            reading.whole(params.take("order"), notes, 0, 1000) or 0,
        )
        defaults = _defaults(params, notes)
        params.leave(notes, "there is no such setting here", _WHYS, _NEEDLESS)
        return Member(kind, worker, task, defaults, found.comments, at)

    def _mocked(self, told: str, task: str, params: Part, at: Given) -> Member:
        """An answer that is always the same."""
        worker = Worker("", None, self._shares(params), None)
        kind = Kind("", None, None, None, None, None, 0, told)
        params.leave(self.notes, "an answer that is always the same has no use for it", {}, {})
        return Member(kind, worker, task, {}, (), at)

    def _key(self, group: str, params: Part, origin: Origin, *, placed: bool) -> Env | None:
        """The variable with a worker's key, also where that is written into the file."""
        given = params.take("api_key")
        if given is None:
            known = origin.key is not None and (not placed or origin.keyed)
            return Env(str(origin.key)) if known else None
        value = given.value
        if isinstance(value, Env):
            return value
        if not isinstance(value, str) or value.lower() in _NO_KEYS:
            self.notes.add(given, "needless", "this is no key; the workers are shown none")
            return None
        name = self._secrets.get(value)
        if name is None:
            stem = re.sub(r"[^A-Z0-9]+", "_", group.upper()).strip("_") or "WORKER"
            taken = [one for one in self._secrets.values() if one.startswith(f"KEY_OF_{stem}")]
            name = f"KEY_OF_{stem}" + (f"_{len(taken) + 1}" if taken else "")
            self._secrets[value] = name
        self.notes.add(given, "changed", f"a secret; it is read from the environment: set {name}")
        return Env(name)

    def _shares(self, params: Part) -> Mapping[str, float]:
        shares = {}
        for key in WEIGHTS:
            given = params.take(key)
            counts = key == "weight" or self._by_rates
            if given is None:
                continue
            if key != "weight":
                kind: Literal["changed", "left out"] = "changed" if counts else "left out"
                why = "a weight, and no limit" if counts else "workers have no limits in time"
                self.notes.add(given, kind, why)
            if counts and (found := reading.number(given, self.notes, 0, 1e12)) is not None:
                shares[key] = found
        return shares


def _task(entry: Part, model: str, notes: Notes) -> str:
    """Raises LeftOut."""
    info = entry.take("model_info")
    mode = None
    if info is not None:
        part = info.part()
        mode = part.take("mode")
        part.leave(notes, _OF_INFO, _INFO_WHYS, {"id": "versions have names of their own"})
    if mode is None:
        if not _EMBEDS.search(model.lower()):
            return "chat"
        why = "is taken for a model of embeddings, by its name; if it is none, remove the task"
        notes.add(entry.given, "changed", why)
        return "embedding"
    task = _TASKS.get(mode.text)
    if task is None:
        raise LeftOut(mode, f"nothing here is for {reading.shown(mode.value)}")
    return task


def _defaults(params: Part, notes: Notes) -> Mapping[str, float]:
    """What holds where a client is silent."""
    found: dict[str, float | None] = {
        "temperature": reading.number(params.take("temperature"), notes, 0, 2),
        "top_p": reading.number(params.take("top_p"), notes, 1e-6, 1),
        "top_k": reading.whole(params.take("top_k"), notes, 1, 1_000_000),
        "max_tokens": reading.whole(params.take("max_tokens"), notes, 1, 1_000_000_000),
    }
    return {key: value for key, value in found.items() if value is not None}

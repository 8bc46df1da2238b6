"""What LiteLLM's file says of all models together: ``router_settings`` and its like."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from gateway.config import units
from gateway.config.complaints import written
from gateway.tools.migrate import reading
from gateway.tools.migrate.groups import Habits, Made
from gateway.tools.migrate.origins import CLIENTS
from gateway.tools.migrate.source import Env, Given, Notes, Part
from gateway.tools.migrate.writing import Told

_POLICIES: Final = {
    "simple-shuffle": "round_robin",
    "least-busy": "least_load",
    "latency-based-routing": "two_choices",
    "usage-based-routing": "least_load",
    "usage-based-routing-v2": "least_load",
    "cost-based-routing": "least_load",
}
_USUAL: Final = "simple-shuffle"
_AS_IT_IS: Final = frozenset({_USUAL, "least-busy"})
_MASTER: Final = "LITELLM_MASTER_KEY_SHA256"

_WHYS: Final = {
    "cache": "answers are not cached",
    "cache_params": "answers are not cached",
    "cache_responses": "answers are not cached",
    "context_window_fallbacks": "a fallback with a larger `limits.context` is asked for these",
    "content_policy_fallbacks": "what a worker refuses is told to the client",
    "retry_policy": "`retries.on` says what is tried again, and `retries.max` how often",
    "allowed_fails_policy": "`breaker` says when failures take a worker out",
    "success_callback": "nothing is sent to others; see `observe`",
    "failure_callback": "nothing is sent to others; see `observe`",
    "callbacks": "nothing is sent to others; see `observe`",
    "alerting": "alert by the metrics of the admin listener",
    "database_url": "there is no database; its keys and models must be written into the file",
    "store_model_in_db": "models that are in the database are not in this file",
    "redis_host": "say `state: {redis: …}` where several gateways share limits",
    "redis_port": "say `state: {redis: …}` where several gateways share limits",
    "redis_password": "say `state: {redis: …}` where several gateways share limits",
    "redis_url": "say `state: {redis: …}` where several gateways share limits",
    "enable_tag_filtering": "write a rule under `routes` for the requests that are meant",
    "custom_auth": "say whose tokens are good by `identity`, or give out keys",
    "enable_jwt_auth": "say whose tokens are good by `identity`",
    "litellm_jwtauth": "say whose tokens are good by `identity`",
    "global_max_parallel_requests": "limit the workers: `max_concurrency`, `total_concurrency`",
}
_NEEDLESS: Final = {
    "set_verbose": "`--log-level` says how much is logged",
    "debug_level": "`--log-level` says how much is logged",
    "json_logs": "a line of JSON is logged for each exchange",
    "background_health_checks": "workers are probed every 5 seconds",
    "health_check_interval": "workers are probed every 5 seconds",
    "enable_pre_call_checks": "what a model can't do is found out before its worker is asked",
    "turn_off_message_logging": "no prompt or answer is ever logged",
    "redact_user_api_key_info": "no key is ever logged",
    "disable_spend_logs": "usage is only kept where `observe.usage` says so",
    "store_prompts_in_spend_logs": "no prompt or answer is ever kept",
    "ignore_invalid_deployments": "a file with an error is refused before it is served",
}
_UNKNOWN: Final = "there is no such setting here"


class Settings:
    """Reads them. ``router`` wins over ``module`` where both say something, as there."""

    def __init__(self, router: Part, module: Part, server: Part, notes: Notes) -> None:
        self._router = router
        self._module = module
        self._server = server
        self._notes = notes

    def _take(self, *keys: str) -> Given | None:
        found = self._router.take(*keys)
        beaten = self._module.take(*keys)
        if found is not None and beaten is not None:
            self._notes.add(beaten, "needless", f"{written(found.path)} wins over it")
        return found or beaten

    def strategy(self) -> str:
        """How workers are chosen, by the other one's name for it."""
        given = self._take("routing_strategy")
        if given is None or given.text in _AS_IT_IS:
            return _USUAL if given is None else given.text
        if (policy := _POLICIES.get(given.text)) is None:
            self._notes.add(given, "left out", "workers take turns; see `policy`")
            return _USUAL
        self._notes.add(given, "changed", f"the nearest policy is {policy}")
        return given.text

    def habits(self, strategy: str) -> Habits:
        """What every pool has."""
        notes = self._notes
        fails = self._take("allowed_fails")
        open_ = reading.seconds(self._take("cooldown_time"), notes)
        breaker: dict[str, Any] = {}
        if (failures := reading.whole(fails, notes, 0, 99_999)) is not None and fails is not None:
            breaker["failures"] = failures + 1
            notes.add(fails, "changed", f"{failures + 1} failures in a row take a worker out")
        if open_ is not None:
            breaker["open"] = open_
        most = self._take("default_max_parallel_requests") or self._server.take(
            "max_parallel_requests"
        )
        return Habits(_POLICIES[strategy], breaker, reading.whole(most, notes, 1, 100_000))

    def defaults(self) -> Mapping[str, Any]:
        """What holds for all models."""
        notes = self._notes
        timeouts = {
            "first_token": reading.seconds(self._take("stream_timeout"), notes),
            "total": reading.seconds(self._take("timeout", "request_timeout"), notes),
        }
        found: dict[str, Any] = {}
        if said := {key: value for key, value in timeouts.items() if value is not None}:
            found["timeouts"] = said
        if (retries := reading.whole(self._take("num_retries"), notes, 0, 10)) is not None:
            found["retries"] = {"max": retries}
        if (drop := self._take("drop_params")) is not None:
            found["on_loss"] = "report" if drop.value is True else "reject"
        return found

    def listening(self) -> Mapping[str, Any]:
        """Where, for whom, and how much at once."""
        notes, found = self._notes, dict[str, Any]()
        key = self._server.take("master_key")
        host = "127.0.0.1" if key is None else "0.0.0.0"
        listener: Any = [{"address": f"{host}:4000", "dialects": [CLIENTS]}]
        if key is None:
            why = ("nobody needs a key, so only this machine is listened to",)
            listener = Told(listener, why)
        found["listeners"] = listener
        if self._has_metrics():
            found["admin"] = Told({"address": "127.0.0.1:8081"}, ("/metrics is here",))
        size = reading.whole(self._server.take("max_request_size_mb"), notes, 1, 1_000_000)
        if size is not None:
            found["limits"] = {"body": f"{size}MiB"}
        if key is not None:
            found["keys"] = self._key(key)
        return found

    def _has_metrics(self) -> bool:
        """Whether requests are counted; everybody else who is told of them is noted."""
        found = False
        for name in ("callbacks", "success_callback", "failure_callback"):
            for given in reading.texts(self._module.take(name)):
                if given.text == "prometheus":
                    found = True
                else:
                    self._notes.add(given, "left out", _WHYS[name])
        return found

    def _key(self, key: Given) -> Any:
        """The one key that is in the file. Its holder may ask for everything."""
        value = key.value
        if not isinstance(value, Env):
            digest = hashlib.sha256(str(value).encode()).hexdigest()
            return [{"name": "master", "sha256": digest}]
        why = f"set {_MASTER}=$(printf %s \"${value.name}\" | sha256sum | cut -d' ' -f1)"
        self._notes.add(key, "changed", f"only its SHA-256 is known here; {why}")
        return Told([{"name": "master", "sha256": Env(_MASTER)}], (why,))

    # --- other names, and other models ------------------------------------------------------------

    def aliases(self, made: Made) -> None:
        """Give the models their other names."""
        given = self._take("model_group_alias")
        if given is None:
            return
        for name, target in given.part().items():
            inner = target.part().take("model") if target.is_mapping else target
            model = "" if inner is None else inner.text
            why = _no_alias(name, model, made)
            if why is not None:
                self._notes.add(target, "left out", why)
            else:
                made.names[name] = model
                made.models[model].setdefault("aliases", []).append(name)

    def fallbacks(self, made: Made) -> None:
        """Say who answers in whose stead."""
        for entry in reading.texts(self._take("fallbacks")):
            for name, others in entry.part().items():
                for other in reading.texts(others):
                    self._fallback(name, other, made)
        for other in reading.texts(self._take("default_fallbacks")):
            if other.text not in made.names:
                self._notes.add(other, "left out", "there is no such model")
                continue
            for name, model in made.models.items():
                own = any(one in made.names for one in model.get("fallback", ()))
                if not own and name != made.names[other.text]:
                    self._fallback(name, other, made)

    def _fallback(self, name: str, other: Given, made: Made) -> None:
        why = _no_fallback(name, other.text, made)
        if why is None:
            made.models[made.names[name]].setdefault("fallback", []).append(other.text)
            if "versions" in made.models[made.names[other.text]]:
                why = f"for {name}: one of its versions is asked, and the others are not then"
                self._notes.add(other, "changed", why)
        else:
            self._notes.add(other, "left out", f"for {name}: {why}")

    def rest(self) -> None:
        """Tell of all that was not asked for."""
        for part in (self._router, self._module, self._server):
            part.leave(self._notes, _UNKNOWN, _WHYS, _NEEDLESS)


def _no_alias(name: str, model: str, made: Made) -> str | None:
    """Why this can't be another name of that model; None where it can."""
    if model not in made.models:
        return f"there is no model {model!r}"
    if name in made.names:
        return "there is a model of this name"
    try:
        units.alias(name)
    except ValueError as error:
        return f"{name!r} {error}"
    return None


def _no_fallback(name: str, other: str, made: Made) -> str | None:
    """Why this can't answer in that one's stead; None where it can."""
    if name not in made.names:
        return "there is no such model"
    if other not in made.names:
        return f"there is no model {other!r}"
    model, after = made.names[name], made.names[other]
    if made.tasks[model] != made.tasks[after]:
        return f"{other!r} has another task"
    if model in (after, *_after(after, made)):
        return f"{other!r} would lead back to it; there may be no circles"
    return None


def _after(model: str, made: Made) -> set[str]:
    """All models to which the fallbacks of this one lead."""
    found: set[str] = set()
    ways = [model]
    while ways:
        names = made.models[ways.pop()].get("fallback", ())
        new = {made.names[one] for one in names if one in made.names} - found
        found |= new
        ways += new
    return found

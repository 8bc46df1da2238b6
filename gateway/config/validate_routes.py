"""Validates routes: unknown names, conditions that can't be met, and routes that never match."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.schema import (
    ApiKeyConfig,
    Config,
    ModelConfig,
    RouteConfig,
    RouteMatchConfig,
    map_model_names,
)
from gateway.config.validation_context import ValidationContext, is_set

WILDCARD_MODEL: Final = "*"
"""The end of the name of a model for every name that begins like it."""


def matches_wildcard(name: str, names: Iterable[str]) -> bool:
    """Whether a model for every name with some beginning serves this name."""
    return any(
        other.endswith(WILDCARD_MODEL) and name.startswith(other.removesuffix(WILDCARD_MODEL))
        for other in names
    )


def check_routes(config: Config, context: ValidationContext) -> None:
    """Report routes with unknown names, and routes that never match."""
    if not is_set(config.routes):
        return
    numbers_by_name: dict[str, int] = {}
    for n, rule in enumerate(config.routes):
        if is_set(rule) and is_set(rule.name) and numbers_by_name.setdefault(rule.name, n) != n:
            message = (
                f"routes[{numbers_by_name[rule.name]}] has the same name; each rule has its own"
            )
            context.add_issue(("routes", n, "name"), message)
    rules = _RouteValidator(config, context)
    earlier: list[tuple[int, RouteMatchConfig]] = []
    for n, rule in enumerate(config.routes):
        if not is_set(rule):
            continue
        rules.check_target(rule, ("routes", n, "to"))
        if is_set(rule.when) and rules.check_match(rule.when, ("routes", n, "when")):
            rules.check_reachable(rule.when, earlier, ("routes", n))
            if rule.when.share in (None, 1):
                earlier.append((n, rule.when))


class _RouteValidator:
    """Validates routes. Names that could not be read are None and are not reported again."""

    def __init__(self, config: Config, context: ValidationContext) -> None:
        self._context = context
        self._models = _get_models(config)
        self._owners = None if self._models is None else map_model_names(self._models)
        self._keys = _get_keys(config)
        self._keys_by_tag = _group_keys_by_tag(self._keys)
        self._listener_protocols = _list_listener_protocols(config)

    def check_target(self, rule: RouteConfig, path: ConfigPath) -> None:
        """Report a target that does not exist."""
        target = rule.to
        if not is_set(target):
            return
        if target.model is None and target.version is None:
            self._context.add_issue(
                path, "the route has no target; give it a model, a version, or both"
            )
        elif is_set(target.model) and (target.model or "").endswith(WILDCARD_MODEL):
            message = "the wildcard model cannot be a target; name a model"
            self._context.add_issue((*path, "model"), message)
        elif self._check_name(target.model, self._owners, "there is no model", (*path, "model")):
            model_name = rule.when.model if is_set(rule.when) else ""
            if target.version is not None and is_set(target.version):
                self._check_version(target.version, target.model or model_name, (*path, "version"))

    def check_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Report conditions that can't be met. Returns False if an issue was reported."""
        results = [
            self._check_name(when.model, self._owners, "there is no model", (*path, "model")),
            self._check_name(when.key, self._keys, "there is no key", (*path, "key")),
            self._check_name(when.tag, self._keys_by_tag, "no key has the tag", (*path, "tag")),
            self._check_protocol(when.protocol, (*path, "protocol")),
            self._check_headers(when.header, (*path, "header")),
            is_set(when.body) and all(map(is_set, when.body.values())),
            is_set(when.share),
        ]
        return all(results) and self._check_key_match(when, path)

    def check_reachable(
        self,
        conditions: RouteMatchConfig,
        earlier: list[tuple[int, RouteMatchConfig]],
        path: ConfigPath,
    ) -> None:
        """Report a route whose requests are all matched by earlier routes."""
        models = [conditions.model] if conditions.model is not None else list(self._models or ())
        rule_numbers: set[int] = set()
        for model in models:
            matching = (
                n
                for n, one in earlier
                if self._applies_to(one, model) and self._covers(one, conditions)
            )
            rule_number = next(matching, None)
            if rule_number is None:
                return
            rule_numbers.add(rule_number)
        if not rule_numbers:  # the models could not be read
            return
        names = " and ".join(f"routes[{n}]" for n in sorted(rule_numbers))
        self._context.add_issue(
            path,
            f"the route never matches: {names} match all its requests before; "
            "move it up, or remove it",
        )

    # --- names ------------------------------------------------------------------------------------

    def _check_name(
        self,
        name: str | None,
        names: Mapping[str, object] | None,
        message_start: str,
        path: ConfigPath,
    ) -> bool:
        """Whether a name that is set is one of ``names``; reports it if not."""
        if name is None or names is None or not is_set(name):
            return name is None
        if name not in names:
            text = quote(self._context.get_raw_text(path))
            self._context.add_issue(path, f"{message_start} {text}; {suggest_name(name, names)}")
        return name in names

    def _check_version(self, version: str, name: str | None, path: ConfigPath) -> None:
        if name is None:
            message = "the model of this version is unknown; add when: {model: NAME}"
            self._context.add_issue(path, message)
            return
        model = (self._models or {}).get((self._owners or {}).get(name, ""))
        if model is None or not is_set(model.versions) or not is_set(model.backend):
            return
        versions = list(model.versions or ("1",))
        if version not in versions:
            text = quote(self._context.get_raw_text(path))
            self._context.add_issue(
                path, f"there is no version {text}; {suggest_name(version, versions)}"
            )

    def _check_protocol(self, name: str | None, path: ConfigPath) -> bool:
        if name is None or not is_set(name):
            return name is None
        if not self._context.check_client_protocol(name, None, path):
            return False
        if self._listener_protocols is not None and name not in self._listener_protocols:
            message = f"no listener serves {name}, so the route never matches"
            self._context.add_issue(
                path, f"{message}; {suggest_name(name, self._listener_protocols)}"
            )
            return False
        return True

    def _check_headers(self, headers: Mapping[str, str], path: ConfigPath) -> bool:
        if not is_set(headers):
            return False
        spellings: dict[str, str] = {}
        for name in headers:
            first = spellings.setdefault(name.lower(), name)
            if first != name:
                message = f"is {quote(first)} again, since headers have no case; keep one"
                self._context.add_issue((*path, name), message, key=True)
        return len(spellings) == len(headers) and all(map(is_set, headers.values()))

    def _check_key_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Whether the key can meet the other conditions; reports it if not."""
        key = (self._keys or {}).get(when.key or "")
        if key is None or self._owners is None:
            return True
        if when.tag is not None and when.tag not in key.tags:
            message = f"the key {quote(key.name)} has no such tag, so the route never matches"
            self._context.add_issue((*path, "tag"), message)
            return False
        allowed_models = {self._owners.get(one, one) for one in key.models or ()}
        if (
            key.models
            and when.model not in (None, WILDCARD_MODEL)
            and self._owners[when.model] not in allowed_models
        ):
            message = f"the key {quote(key.name)} may not use this model, so the route "
            self._context.add_issue((*path, "model"), message + "never matches")
            return False
        return True

    # --- unreachable routes -----------------------------------------------------------------------

    def _applies_to(self, when: RouteMatchConfig, model: str) -> bool:
        owners = self._owners or {}
        return when.model is None or owners[when.model] == owners[model]

    def _covers(self, wide: RouteMatchConfig, narrow: RouteMatchConfig) -> bool:
        """Whether ``wide`` matches whenever ``narrow`` does, models and shares aside."""
        anybody = wide.key is None and wide.tag is None
        keyed = narrow.key is not None or narrow.tag is not None
        headers = {name.lower(): text for name, text in narrow.header.items()}
        return (
            wide.protocol in (None, narrow.protocol)
            and (
                anybody
                or (keyed and self._find_matching_keys(narrow) <= self._find_matching_keys(wide))
            )
            and all(headers.get(name.lower()) == text for name, text in wide.header.items())
            and all(_is_equal_scalar(narrow.body.get(name), one) for name, one in wide.body.items())
        )

    def _find_matching_keys(self, when: RouteMatchConfig) -> AbstractSet[str]:
        """The keys whose requests the conditions can match."""
        keys = self._keys or {}
        names = keys.keys() if when.key is None else keys.keys() & {when.key}
        return names if when.tag is None else names & (self._keys_by_tag or {}).get(when.tag, set())


def _get_models(config: Config) -> Mapping[str, ModelConfig] | None:
    """Every model by its name, if all could be read."""
    models = config.models
    if not is_set(models) or not all(map(is_set, models.values())):
        return None
    aliases = [one.aliases for one in models.values()]
    is_complete = all(map(is_set, aliases)) and all(
        is_set(alias) for group in aliases for alias in group
    )
    return models if is_complete else None


def _get_keys(config: Config) -> Mapping[str, ApiKeyConfig] | None:
    """Every key by its name, if all could be read."""
    keys = config.keys
    if not is_set(keys) or not all(map(is_set, keys)):
        return None
    read = (is_set(key.name) and is_set(key.tags) and is_set(key.models) for key in keys)
    return {key.name: key for key in keys} if all(read) else None


def _group_keys_by_tag(
    keys: Mapping[str, ApiKeyConfig] | None,
) -> Mapping[str, AbstractSet[str]] | None:
    """The names of the keys that have a tag, by tag."""
    if keys is None:
        return None
    names_by_tag: dict[str, set[str]] = {}
    for name, key in keys.items():
        for tag in key.tags:
            names_by_tag.setdefault(tag, set()).add(name)
    return names_by_tag


def _list_listener_protocols(config: Config) -> list[str] | None:
    """The protocols of the listeners, if all could be read; every protocol without listeners."""
    if not is_set(config.listeners) or not config.listeners:
        return None
    if not all(is_set(one) and is_set(one.protocols) for one in config.listeners):
        return None
    protocols = [protocol for one in config.listeners for protocol in one.protocols]
    if not all(is_set(protocol) and is_set(protocol.name) for protocol in protocols):
        return None
    return [protocol.name for protocol in protocols]


def _is_equal_scalar(first: object, second: object) -> bool:
    """Whether two scalars are equal: 1 is 1.0, but not true."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)

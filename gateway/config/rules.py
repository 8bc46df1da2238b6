"""Whether the rules make sense: names that lead somewhere, and none that is never followed."""

from collections.abc import Mapping

from gateway.config.complaints import ConfigPath, quote, suggest_name
from gateway.config.ground import ValidationContext, is_set
from gateway.config.shape import ApiKeyConfig, Config, ModelConfig, RouteConfig, RouteMatchConfig

_WILDCARD_MODEL = "*"


def check_routes(config: Config, ground: ValidationContext) -> None:
    """Complain of the rules."""
    if not is_set(config.routes):
        return
    seen: dict[str, int] = {}
    for n, rule in enumerate(config.routes):
        if is_set(rule) and is_set(rule.name) and seen.setdefault(rule.name, n) != n:
            message = f"routes[{seen[rule.name]}] has the same name; each rule has its own"
            ground.add_issue(("routes", n, "name"), message)
    rules = _RouteValidator(config, ground)
    earlier: list[tuple[int, RouteMatchConfig]] = []
    for n, rule in enumerate(config.routes):
        if not is_set(rule):
            continue
        rules.check_target(rule, ("routes", n, "use"))
        if is_set(rule.when) and rules.check_match(rule.when, ("routes", n, "when")):
            rules.check_reachable(rule.when, earlier, ("routes", n))
            if rule.when.share in (None, 1):
                earlier.append((n, rule.when))


class _RouteValidator:
    """What the rules may name. What could not be read is None, and stays silent."""

    def __init__(self, config: Config, ground: ValidationContext) -> None:
        self._context = ground
        self._models = _get_models(config)
        self._owners = _map_model_owners(self._models)
        self._keys = _get_keys(config)
        self._listener_protocols = _list_listener_protocols(config)

    def check_target(self, rule: RouteConfig, path: ConfigPath) -> None:
        """Complain of where it leads to."""
        use = rule.use
        if not is_set(use):
            return
        if use.model is None and use.version is None:
            self._context.add_issue(
                path, "the rule leads nowhere; give it a model, a version, or both"
            )
        elif use.model == _WILDCARD_MODEL:
            message = "it takes names that no model has, and here there is none; name a model"
            self._context.add_issue((*path, "model"), message)
        elif self._check_name(use.model, self._owners, "there is no model", (*path, "model")):
            asked = rule.when.model if is_set(rule.when) else ""
            if use.version is not None and is_set(use.version):
                self._check_version(use.version, use.model or asked, (*path, "version"))

    def check_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Complain of what can't hold. False where there is anything to complain of."""
        good = [
            self._check_name(when.model, self._owners, "there is no model", (*path, "model")),
            self._check_name(when.key, self._keys, "there is no key", (*path, "key")),
            self._check_name(
                when.tag, _collect_tags(self._keys), "no key has the tag", (*path, "tag")
            ),
            self._check_protocol(when.dialect, (*path, "dialect")),
            self._check_headers(when.header, (*path, "header")),
            is_set(when.body) and all(map(is_set, when.body.values())),
            is_set(when.share),
        ]
        return all(good) and self._check_key_match(when, path)

    def check_reachable(
        self, when: RouteMatchConfig, earlier: list[tuple[int, RouteMatchConfig]], path: ConfigPath
    ) -> None:
        """Complain of a rule for which those before leave no request over."""
        asked = [when.model] if when.model is not None else list(self._models or ())
        takers: set[int] = set()
        for model in asked:
            takes = (
                n for n, one in earlier if self._applies_to(one, model) and self._covers(one, when)
            )
            taker = next(takes, None)
            if taker is None:
                return
            takers.add(taker)
        if not takers:  # of models that could not be read
            return
        names = " and ".join(f"routes[{n}]" for n in sorted(takers))
        self._context.add_issue(
            path,
            f"the rule is never followed: all that it is for goes by {names} before; "
            "move it up, or remove it",
        )

    # --- names ------------------------------------------------------------------------------------

    def _check_name(
        self, name: str | None, names: Mapping[str, object] | None, what: str, path: ConfigPath
    ) -> bool:
        """Whether a name is one of these, if it is given. Complains where it is none."""
        if name is None or names is None or not is_set(name):
            return name is None
        if name not in names:
            shown = quote(self._context.get_raw_text(path))
            self._context.add_issue(path, f"{what} {shown}; {suggest_name(name, names)}")
        return name in names

    def _check_version(self, version: str, name: str | None, path: ConfigPath) -> None:
        if name is None:
            message = "whose version? say for which model the rule is: when: {model: NAME}"
            self._context.add_issue(path, message)
            return
        model = (self._models or {}).get((self._owners or {}).get(name, ""))
        if model is None or not is_set(model.versions) or not is_set(model.backend):
            return
        versions = list(model.versions or ("1",))
        if version not in versions:
            shown = quote(self._context.get_raw_text(path))
            self._context.add_issue(
                path, f"there is no version {shown}; {suggest_name(version, versions)}"
            )

    def _check_protocol(self, name: str | None, path: ConfigPath) -> bool:
        if name is None or not is_set(name):
            return name is None
        if not self._context.check_client_protocol(name, None, path):
            return False
        if self._listener_protocols is not None and name not in self._listener_protocols:
            message = f"no listener speaks {name}, so the rule is never followed"
            self._context.add_issue(
                path, f"{message}; {suggest_name(name, self._listener_protocols)}"
            )
            return False
        return True

    def _check_headers(self, headers: Mapping[str, str], path: ConfigPath) -> bool:
        if not is_set(headers):
            return False
        seen: dict[str, str] = {}
        for name in headers:
            first = seen.setdefault(name.lower(), name)
            if first != name:
                message = f"is {quote(first)} again, since headers have no case; keep one"
                self._context.add_issue((*path, name), message, key=True)
        return len(seen) == len(headers) and all(map(is_set, headers.values()))

    def _check_key_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Whether there is a key that all of it can hold for."""
        key = (self._keys or {}).get(when.key or "")
        if key is None or self._owners is None:
            return True
        if when.tag is not None and when.tag not in key.tags:
            message = f"the key {quote(key.name)} has no such tag, so the rule is never followed"
            self._context.add_issue((*path, "tag"), message)
            return False
        asks = {self._owners.get(one, one) for one in key.models or ()}
        if (
            key.models
            and when.model not in (None, _WILDCARD_MODEL)
            and self._owners[when.model] not in asks
        ):
            message = f"the key {quote(key.name)} may not ask for this model, so the rule is "
            self._context.add_issue((*path, "model"), message + "never followed")
            return False
        return True

    # --- what takes what --------------------------------------------------------------------------

    def _applies_to(self, when: RouteMatchConfig, model: str) -> bool:
        owners = self._owners or {}
        return when.model is None or owners[when.model] == owners[model]

    def _covers(self, wide: RouteMatchConfig, narrow: RouteMatchConfig) -> bool:
        """Whether one holds wherever the other does, models and shares left aside."""
        anybody = wide.key is None and wide.tag is None
        keyed = narrow.key is not None or narrow.tag is not None
        headers = {name.lower(): text for name, text in narrow.header.items()}
        return (
            wide.dialect in (None, narrow.dialect)
            and (
                anybody
                or (keyed and self._find_matching_keys(narrow) <= self._find_matching_keys(wide))
            )
            and all(headers.get(name.lower()) == text for name, text in wide.header.items())
            and all(_is_equal_scalar(narrow.body.get(name), one) for name, one in wide.body.items())
        )

    def _find_matching_keys(self, when: RouteMatchConfig) -> set[str]:
        """The keys that a rule can hold for."""
        return {
            name
            for name, key in (self._keys or {}).items()
            if when.key in (None, name) and (when.tag is None or when.tag in key.tags)
        }


def _get_models(config: Config) -> Mapping[str, ModelConfig] | None:
    """Every model by its name, if all could be read."""
    models = config.models
    if not is_set(models) or not all(map(is_set, models.values())):
        return None
    aliases = [one.aliases for one in models.values()]
    good = all(map(is_set, aliases)) and all(is_set(alias) for some in aliases for alias in some)
    return models if good else None


def _map_model_owners(models: Mapping[str, ModelConfig] | None) -> Mapping[str, str] | None:
    """The model that each name stands for."""
    if models is None:
        return None
    aliases = {alias: name for name, model in models.items() for alias in model.aliases}
    return {**aliases, **{name: name for name in models}}


def _get_keys(config: Config) -> Mapping[str, ApiKeyConfig] | None:
    """Every key by its name, if all could be read."""
    keys = config.keys
    if not is_set(keys) or not all(map(is_set, keys)):
        return None
    read = (is_set(key.name) and is_set(key.tags) and is_set(key.models) for key in keys)
    return {key.name: key for key in keys} if all(read) else None


def _collect_tags(keys: Mapping[str, ApiKeyConfig] | None) -> Mapping[str, object] | None:
    if keys is None:
        return None
    return dict.fromkeys(tag for key in keys.values() for tag in key.tags)


def _list_listener_protocols(config: Config) -> list[str] | None:
    """The dialects on the listeners, if all could be read; without listeners, every one is."""
    if not is_set(config.listeners) or not config.listeners:
        return None
    if not all(is_set(one) and is_set(one.dialects) for one in config.listeners):
        return None
    mounts = [mount for one in config.listeners for mount in one.dialects]
    if not all(is_set(mount) and is_set(mount.name) for mount in mounts):
        return None
    return [mount.name for mount in mounts]


def _is_equal_scalar(one: object, other: object) -> bool:
    """Whether two scalars are one: 1 is 1.0, and is not true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)

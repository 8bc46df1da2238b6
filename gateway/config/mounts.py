"""Whether the listeners make sense: their addresses, and the dialects mounted on them."""

from collections.abc import Iterator

from gateway.config.addresses import literal, split_address
from gateway.config.complaints import Steps, instead, quoted
from gateway.config.dialects import mismatch
from gateway.config.ground import Ground, known
from gateway.config.shape import Config, Listener, ListenerDialect
from gateway.core.ports import Dialect

_EVERYWHERE = frozenset({"0.0.0.0", "::"})


def check(config: Config, ground: Ground, *, insecure: bool) -> None:
    """Complain of the listeners."""
    seen: list[tuple[str, int]] = []
    if known(config.admin) and config.admin is not None and known(config.admin.address):
        address, where = config.admin.address, ("admin", "address")
        _check_address(address, where, seen, ground)
        if config.admin.sha256 is None and not is_loopback(address):
            ground.say(
                where,
                "whoever reaches this address could change the workers; "
                "give the admin listener the sha256 of a key, or let it listen on 127.0.0.1",
            )
    if not known(config.listeners):
        return
    for n, listener in enumerate(config.listeners):
        path = ("listeners", n)
        if not known(listener):
            continue
        if known(listener.address):
            _check_address(listener.address, (*path, "address"), seen, ground)
            if not insecure and _open(config) and not is_loopback(listener.address):
                ground.say(
                    (*path, "address"),
                    "whoever reaches this address may use every model, since there are no keys; "
                    "add keys, listen on 127.0.0.1, or start with --insecure-no-auth",
                )
        if known(listener.dialects):
            _check_mounts(listener, (*path, "dialects"), ground, named(config))


def _open(config: Config) -> bool:
    """Whether nobody needs a key."""
    return config.keys == () and config.identity is None


def _check_address(address: str, path: Steps, seen: list[tuple[str, int]], ground: Ground) -> None:
    host, port = split_address(address)
    for other, other_port in seen:
        same = host == other or not _EVERYWHERE.isdisjoint((host, other))
        if port and port == other_port and same:
            ground.say(
                path,
                f"another listener has {other}:{other_port} already; "
                "choose another port, or mount the dialects on one listener",
            )
            return
    seen.append((host, port))


def is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    found = literal(host)
    return found.is_loopback if found is not None else host == "localhost"


def named(config: Config) -> frozenset[str]:
    """The dialects that a key or a model names for the case that several have one path."""
    keys = config.keys if known(config.keys) else ()
    models = config.models.values() if known(config.models) else ()
    holders = [holder for holder in (*keys, *models) if known(holder)]
    return frozenset(h.dialect for h in holders if known(h.dialect) and h.dialect is not None)


def _check_mounts(
    listener: Listener, path: Steps, ground: Ground, reachable: frozenset[str]
) -> None:
    claimed: dict[tuple[str, str], str] = {}
    for n, mount in enumerate(listener.dialects):
        if not known(mount) or not known(mount.name):
            continue
        at = (*path, n)
        made = _check_mount(mount, at, ground)
        if made is None or not known(mount.prefix):
            continue
        claims = set(paths(made, mount.prefix))
        taken = sorted(claims & claimed.keys())
        if taken and not (listener.dialect_header is True or mount.name in reachable):
            method, where = taken[0]
            ground.say(
                at,
                f"{method} {where} is {claimed[taken[0]]}'s on this listener already; "
                f"give this one a prefix: {{name: {mount.name}, prefix: /{mount.name}}}, "
                "or name it as a key's or a model's dialect",
            )
        claimed |= dict.fromkeys(claims - claimed.keys(), mount.name)


def paths(dialect: Dialect, prefix: str) -> Iterator[tuple[str, str]]:
    """Method and path of each endpoint; what stands for a segment is not told apart."""
    for endpoint in dialect.endpoints:
        steps = endpoint.path.split("/")
        path = "/".join("{}" if step.startswith("{") else step for step in steps)
        yield endpoint.method, prefix + path


def _check_mount(mount: ListenerDialect, path: Steps, ground: Ground) -> Dialect | None:
    """The dialect, unless something is wrong with it."""
    if not ground.check_spoken(mount.name, mount.profile, (*path, "name"), (*path, "profile")):
        return None
    takes = ground.dialects.options(mount.name)
    good = True
    for key, value in mount.options.items():
        at = (*path, key)
        if key not in takes:
            fields = ["name", "profile", "prefix", *takes]
            ground.say(at, f"there is no {quoted(key)} here; {instead(key, fields)}", key=True)
            good = False
        elif not known(value):
            good = False
        elif wrong := mismatch(value, takes[key]):
            ground.say(at, wrong)
            good = False
    if not good:
        return None
    try:
        return ground.dialects.make(mount.name, mount.profile, mount.options)
    except ValueError as error:
        ground.say(path, str(error))
        return None

"""Whether the addresses of the listeners make sense."""

from gateway.config.addresses import parse_ip, split_address
from gateway.config.complaints import ConfigPath
from gateway.config.ground import ValidationContext, is_set
from gateway.config.shape import Config

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})


def check_listeners(config: Config, ground: ValidationContext, *, insecure: bool) -> None:
    """Complain of the listeners."""
    seen: list[tuple[str, int]] = []
    if is_set(config.admin) and config.admin is not None and is_set(config.admin.address):
        address, where = config.admin.address, ("admin", "address")
        _check_listen_address(address, where, seen, ground)
        if config.admin.sha256 is None and not is_loopback(address):
            ground.add_issue(
                where,
                "whoever reaches this address could change the workers; "
                "give the admin listener the sha256 of a key, or let it listen on 127.0.0.1",
            )
    if not is_set(config.listeners):
        return
    for n, listener in enumerate(config.listeners):
        path = ("listeners", n)
        if not is_set(listener):
            continue
        if is_set(listener.address):
            _check_listen_address(listener.address, (*path, "address"), seen, ground)
            if not insecure and _has_no_auth(config) and not is_loopback(listener.address):
                ground.add_issue(
                    (*path, "address"),
                    "whoever reaches this address may use every model, since there are no keys; "
                    "add keys, listen on 127.0.0.1, or start with --insecure-no-auth",
                )


def _has_no_auth(config: Config) -> bool:
    """Whether nobody needs a key."""
    return config.keys == () and config.identity is None


def _check_listen_address(
    address: str, path: ConfigPath, seen: list[tuple[str, int]], ground: ValidationContext
) -> None:
    host, port = split_address(address)
    for other, other_port in seen:
        same = host == other or not _WILDCARD_HOSTS.isdisjoint((host, other))
        if port and port == other_port and same:
            ground.add_issue(
                path,
                f"another listener has {other}:{other_port} already; "
                "choose another port, or mount the dialects on one listener",
            )
            return
    seen.append((host, port))


def is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    found = parse_ip(host)
    return found.is_loopback if found is not None else host == "localhost"

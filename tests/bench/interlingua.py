"""The measured gateway: a process of its own, in several configurations."""

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.bench.gateways import (
    FROM_MINDIE,
    FROM_TRITON,
    OPENAI,
    REPEATED_MODEL,
    TO_TRITON,
    TRITON_PREFIX,
    Gateway,
    LaunchCommand,
    LaunchContext,
    make_constant,
)
from tests.bench.loads import (
    KEY_COUNTS,
    KEYS,
    MANY,
    MANY_MODELS,
    MODEL_COUNTS,
    MODELS,
    RATE,
    STREAM_RATE,
    UNARY,
    make_keys,
    make_model_names,
)

ROOT: Final = Path(__file__).parents[2]
_LISTENER: Final = """
  - address: "127.0.0.1:{port}"
    {protocols}:
      - openai
      - {{name: triton, profile: vllm}}
      - {{name: mindie, prefix: /mindie}}"""
_CONFIG: Final = """
listeners:{listeners}
admin: {{address: "127.0.0.1:0"}}
limits: {{body: 32MiB}}
backends:
  same: {{{protocol}: openai, workers: ["http://127.0.0.1:{worker}"]}}
  other:
    {protocol}: triton
    profile: vllm
    {template_key}: "{template}"
    workers: ["http://127.0.0.1:{worker}"]
models:
{models}
keys:
{keys}
{features}
"""
_ALL_FEATURES: Final = """
defaults:
  limits:
    requests: 10000000/min
    tokens: 1000000k/min
    concurrent: 10000
    budget: 1000000M/day
observe:
  usage: {folder}/usage.sqlite
"""
_TEMPLATE: Final = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


class Keywords(Struct, frozen=True):
    """Keys and values of the configuration that differ between revisions."""

    protocols: str = "protocols"
    protocol: str = "protocol"
    template: str = "chat_template"


def keywords(tree: Path) -> Keywords:
    """Return the keywords of the gateway in this folder."""
    if (tree / "protocols" / "core").is_dir():
        return Keywords()
    return Keywords("dialects", "dialect", "template")


def start(
    context: LaunchContext,
    tree: Path = ROOT,
    *,
    processes: int = 1,
    all_features: bool = False,
    models: Sequence[str] = MODELS,
    keys: Sequence[str] = KEYS,
) -> LaunchCommand:
    """Start ``interlingua serve`` with keys, retries, health checks, metrics and the access log.

    ``tree`` is the folder of the gateway's source. ``all_features`` adds limits for each key and
    usage rows.
    """
    template = context.folder / "chat.jinja"
    template.write_text(_TEMPLATE, "utf-8")
    file = context.folder / "gateway.yaml"
    words = keywords(tree)
    names = [REPEATED_MODEL, *models]
    listeners = _LISTENER.format(port=context.port, protocols=words.protocols)
    if context.tls_port:
        pem = f'"{context.certificate}"'
        listeners += _LISTENER.format(port=context.tls_port, protocols=words.protocols)
        listeners += f"\n    tls: {{cert: {pem}, key: {pem}}}"
    config = _CONFIG.format(
        listeners=listeners,
        worker=context.worker_port,
        template=template,
        template_key=words.template,
        protocol=words.protocol,
        models="\n".join(_format_models(names)),
        keys="\n".join(_format_keys(keys, names)),
        features=_ALL_FEATURES.format(folder=context.folder) if all_features else "",
    )
    file.write_text(config, "utf-8")
    arguments = ["--processes", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "gateway", "serve", str(file), *arguments]
    return LaunchCommand(command, {"PYTHONPATH": str(tree)}, tree)


def _format_models(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"  {name}: {{backend: same}}"
        yield f"  {TRITON_PREFIX}{name}: {{backend: other, model: {name}}}"


def _format_keys(keys: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Format the keys; beyond the usual number, they have no list of models."""
    allowed = ", ".join([*names, *(TRITON_PREFIX + name for name in names)])
    models = f", models: [{allowed}]" if len(keys) <= len(KEYS) else ""
    for number, key in enumerate(keys):
        digest = hashlib.sha256(key.encode()).hexdigest()
        yield f'  - {{name: bench-{number}, sha256: "{digest}"{models}}}'


@contextmanager
def at_revision(revision: str) -> Iterator[Gateway]:
    """Check out another revision's gateway in a temporary git worktree.

    Raises RuntimeError if there is no such revision.
    """
    git = shutil.which("git")
    if git is None:
        raise RuntimeError("--against needs git")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tree = Path(folder) / "tree"
        add = [git, "-C", str(ROOT), "worktree", "add", "--detach", str(tree), revision]
        added = subprocess.run(add, capture_output=True, text=True, check=False)
        if added.returncode:
            raise RuntimeError(f"--against {revision}: {added.stderr.strip()}")
        try:
            yield Gateway(
                name=f"revision {revision}",
                start=partial(start, tree=tree),
                version=make_constant(f"{revision}, with the same Python and libraries"),
                pairs=INTERLINGUA.pairs,
                tls=True,
            )
        finally:
            remove = [git, "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, capture_output=True, check=True)


def start_bare_server(context: LaunchContext) -> LaunchCommand:
    """Start the minimal HTTP server."""
    return LaunchCommand(
        [sys.executable, str(Path(__file__).with_name("bare_server.py")), str(context.port)]
    )


_LIBRARIES: Final = ", ".join(
    f"{name} {version(name)}" for name in ("uvloop", "httptools", "aiohttp", "msgspec")
)
INTERLINGUA: Final = Gateway(
    name="interlingua",
    start=start,
    version=make_constant(
        f"{version('interlingua')} (Python {platform.python_version()}, {_LIBRARIES})"
    ),
    pairs=(OPENAI, TO_TRITON, FROM_TRITON, FROM_MINDIE),
    tls=True,
)
ALL_FEATURES: Final = Gateway(
    name="interlingua, all features",
    start=partial(start, all_features=True),
    version=make_constant("with limits of each key, and a row in SQLite for each request"),
    pairs=(OPENAI,),
    loads=frozenset({UNARY.name}),
)
MANY_MODELS_AND_KEYS: Final = Gateway(
    name=MANY_MODELS,
    start=partial(start, models=make_model_names(MANY), keys=make_keys(MANY)),
    version=make_constant("the default features; 2,002 models and 1,000 keys"),
    pairs=(OPENAI,),
    loads=frozenset(load.name for load in (*MODEL_COUNTS.values(), *KEY_COUNTS.values())),
)
BARE_SERVER: Final = Gateway(
    name="bare server",
    start=start_bare_server,
    version=make_constant(f"uvloop {version('uvloop')}, without HTTP parser and worker"),
    pairs=(OPENAI,),
    loads=frozenset({UNARY.name}),
    forms=frozenset({"unary"}),
)
DIRECT: Final = Gateway(
    name="no gateway",
    start=None,
    version=make_constant("the worker's own share"),
    pairs=(OPENAI,),
    loads=frozenset({UNARY.name, RATE.name, STREAM_RATE.name}),
)

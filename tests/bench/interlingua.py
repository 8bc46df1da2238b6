"""The gateway under test: a process of its own, with what anybody would have switched on."""

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.bench.gateways import (
    FROM_TRITON,
    OPENAI,
    TO_TRITON,
    TRITON_PREFIX,
    Gateway,
    LaunchCommand,
    LaunchContext,
    make_constant,
)
from tests.bench.traffic import KEYS, MODELS

ROOT: Final = Path(__file__).parents[2]
_CONFIG: Final = """
listeners:
  - {{address: "127.0.0.1:{port}", {protocols}: [openai, {{name: triton, profile: vllm}}]{server}}}
admin: {{address: "127.0.0.1:0"}}
limits: {{body: 8MiB}}
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
"""
_TEMPLATE: Final = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
_NAMES: Final = (OPENAI.model, *MODELS)


class Keywords(Struct, frozen=True):
    """Keys and values of the configuration that not every revision calls the same."""

    protocols: str = "protocols"
    protocol: str = "protocol"
    aiohttp_server: str = "http_server: aiohttp"
    template: str = "chat_template"


def keywords(tree: Path) -> Keywords:
    """Those of the gateway in this folder."""
    if (tree / "protocols" / "core").is_dir():
        return Keywords()
    return Keywords("dialects", "dialect", "front: reference", "template")


def start(
    context: LaunchContext, tree: Path = ROOT, *, processes: int = 1, aiohttp: bool = False
) -> LaunchCommand:
    """``interlingua serve`` with keys, limits, retries, metrics and a log line for each request.

    ``tree`` is the folder whose gateway it is. ``aiohttp`` chooses aiohttp's HTTP server.
    """
    template = context.folder / "chat.jinja"
    template.write_text(_TEMPLATE, "utf-8")
    file = context.folder / "gateway.yaml"
    words = keywords(tree)
    config = _CONFIG.format(
        port=context.port,
        worker=context.worker_port,
        template=template,
        template_key=words.template,
        protocols=words.protocols,
        protocol=words.protocol,
        server=f", {words.aiohttp_server}" if aiohttp else "",
        models="\n".join(_models()),
        keys="\n".join(_keys()),
    )
    file.write_text(config, "utf-8")
    more = ["--processes", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "gateway", "serve", str(file), *more]
    return LaunchCommand(command, {"PYTHONPATH": str(tree)}, tree)


def _models() -> Iterator[str]:
    for name in _NAMES:
        yield f"  {name}: {{backend: same}}"
        yield f"  {TRITON_PREFIX}{name}: {{backend: other, model: {name}}}"


def _keys() -> Iterator[str]:
    models = ", ".join([*_NAMES, *(TRITON_PREFIX + name for name in _NAMES)])
    for number, key in enumerate(KEYS):
        digest = hashlib.sha256(key.encode()).hexdigest()
        yield f'  - {{name: bench-{number}, sha256: "{digest}", models: [{models}]}}'


@contextmanager
def at_revision(revision: str) -> Iterator[Gateway]:
    """The gateway of another revision, in a git worktree that is there meanwhile.

    Raises RuntimeError where there is no such revision.
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
            )
        finally:
            remove = [git, "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, capture_output=True, check=True)


def echo(context: LaunchContext) -> LaunchCommand:
    """What everything else in Python can be measured by."""
    return LaunchCommand(
        [sys.executable, str(Path(__file__).with_name("echo.py")), str(context.port)]
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
    pairs=(OPENAI, TO_TRITON, FROM_TRITON),
)
AIOHTTP_SERVER: Final = Gateway(
    name="interlingua, reference front",
    start=partial(start, aiohttp=True),
    version=make_constant(f"aiohttp {version('aiohttp')} in the place of our own listener"),
    pairs=(OPENAI,),
)
TWO_PROCESSES: Final = Gateway(
    name="interlingua, two processes",
    start=partial(start, processes=2),
    version=make_constant("--processes 2; here they share a core"),
    pairs=(OPENAI,),
)
BARE_SERVER: Final = Gateway(
    name="bare protocol",
    start=echo,
    version=make_constant(f"uvloop {version('uvloop')}, no parser, no worker"),
    pairs=(OPENAI,),
    forms=frozenset({"whole"}),
)
DIRECT: Final = Gateway(
    name="no gateway",
    start=None,
    version=make_constant("the worker's own share"),
    pairs=(OPENAI,),
)

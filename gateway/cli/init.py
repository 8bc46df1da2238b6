"""``interlingua init``: write a commented configuration to start with."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from msgspec import Struct

from gateway.cli.built_in import read_built_in_config
from gateway.cli.console import write_file
from gateway.cli.keys import create_key
from gateway.config.errors import ConfigError
from gateway.config.jsonschema import build_schema
from gateway.config.loader import load_text
from gateway.terminal import print_text
from protocols.core.units import parse_model_name, parse_worker_url

SCHEMA_FILE: Final = "interlingua.schema.json"
"""The JSON Schema that is written beside the configuration."""
_DEFAULT_WORKER: Final = "http://127.0.0.1:8001"


class StarterAnswers(Struct, frozen=True, kw_only=True):
    """What a starter configuration depends on."""

    workers: Sequence[str]
    """The URLs of the workers."""
    model: str
    """The model's name for clients."""
    worker_model: str
    """The model's name at the workers."""
    candidate: str | None = None
    """The name at the workers of a second version, for an A/B test."""
    key_sha256: str | None = None
    """The digest of an API key; None: clients need no key."""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default="gateway.yaml")
@click.option(
    "--worker", "workers", multiple=True, metavar="URL", help="A worker; may be repeated."
)
@click.option("--model", metavar="NAME", help="The model's name for clients.")
@click.option("--worker-model", metavar="NAME", help="The model's name at the workers.")
@click.option(
    "--candidate", metavar="NAME", help="The worker's name of a second version, for an A/B test."
)
@click.option("--key/--no-key", default=None, help="Whether clients need an API key.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def init(file: Path, *, force: bool, **options: Any) -> None:
    """Write a commented configuration to FILE (gateway.yaml), to start with.

    It asks for what the options leave open, if it runs in a terminal. The configuration's JSON
    Schema is written beside FILE, for completion and checks in editors.

    \b
      interlingua init
      interlingua init --worker http://10.0.0.11:8000 --model chat --worker-model llama3 --key
      interlingua init --worker-model llama3 --candidate llama3.1 --no-key

    Exit codes: 0 written, 1 an answer is invalid, 2 wrong usage, or FILE exists.
    """  # noqa: D301 - click reads \b
    if file.exists() and not force:
        raise click.UsageError(f"{file} exists; --force overwrites it")
    key = None
    answers = _ask(options, interactive=_is_terminal())
    if answers.key_sha256 is None and options["key"]:
        key = create_key()
        digest = hashlib.sha256(key.encode()).hexdigest()
        answers = msgspec.structs.replace(answers, key_sha256=digest)
    text = format_starter(answers)
    try:
        load_text(text, str(file), env=os.environ)
    except ConfigError as error:
        print_text(str(error), err=True)
        sys.exit(1)
    write_file(file, text)
    schema = msgspec.json.format(msgspec.json.encode(build_schema()), indent=2)
    write_file(file.with_name(SCHEMA_FILE), f"{schema.decode()}\n")
    if key is not None:
        print_text(f"The API key, which is shown only now: {key}")
    print_text(f"{file} is written. Next: interlingua check --connect {file}")
    print_text(f"                       interlingua serve {file}")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(options: dict[str, Any], *, interactive: bool) -> StarterAnswers:
    """The answers: the options, and in a terminal what the user types.

    A wrong answer is asked for again at once.
    """

    def ask(text: str, default: str, check: Callable[[str], object] = str) -> str:
        if not interactive:
            return default

        def read(answer: str) -> str:
            try:
                check(answer)
            except ValueError as error:
                raise click.BadParameter(f"{answer} {error}") from None
            return answer

        return str(click.prompt(text, default=default, value_proc=read))

    workers = options["workers"] or ask("URLs of the workers", _DEFAULT_WORKER, _check_urls).split()
    model = options["model"] or ask("Name of the model for clients", "chat", parse_model_name)
    worker_model = options["worker_model"] or ask("Name of the model at the workers", model)
    candidate = options["candidate"]
    if interactive and candidate is None:
        candidate = ask("Name of a second version at the workers, for an A/B test", "none")
    if options["key"] is None:
        options["key"] = interactive and click.confirm("Do clients need an API key?", default=True)
    return StarterAnswers(
        workers=workers,
        model=model,
        worker_model=worker_model,
        candidate=None if candidate == "none" else candidate,
    )


def _check_urls(text: str) -> None:
    """Raises ValueError unless these are URLs of workers."""
    for url in text.split():
        parse_worker_url(url)


def format_starter(answers: StarterAnswers) -> str:
    """The configuration as YAML, with comments."""
    replacements = {
        "      - $WORKERS\n": "".join(f"      - {_quote(url)}\n" for url in answers.workers),
        "$MODEL": _quote(answers.model),
        "    # $TARGETS\n": _format_targets(answers),
        "# $KEYS\n": f"\n{_format_keys(answers)}",
    }
    text, _ = read_built_in_config("starter")
    for placeholder, replacement in replacements.items():
        text = text.replace(placeholder, replacement, 1)
    return text


def _format_targets(answers: StarterAnswers) -> str:
    if answers.candidate is None:
        return f"    backend: workers\n    model: {_quote(answers.worker_model)}\n"
    return f"""\
    versions:
      "1": {{backend: workers, model: {_quote(answers.worker_model)}}}
      "2": {{backend: workers, model: {_quote(answers.candidate)}}}
    # 90 % of the requests go to version 1. `interlingua ab` compares the versions.
    split: {{name: candidate, weights: {{"1": 90, "2": 10}}}}
"""


def _format_keys(answers: StarterAnswers) -> str:
    if answers.key_sha256 is None:
        return """\
# API keys: `interlingua keys new --name NAME` creates one and prints its lines.
# keys:
#   - {name: web-app, sha256: "…", models: [chat], limits: {requests: 60/min, concurrent: 8}}
"""
    return f"""\
# API keys: `interlingua keys new --name NAME` creates further ones.
keys:
  - {{name: first, sha256: "{answers.key_sha256}"}} # limits: {{requests: 60/min, concurrent: 8}}
"""


def _quote(text: str) -> str:
    """As a YAML string in quotes: JSON's, which YAML accepts."""
    return msgspec.json.encode(text).decode()

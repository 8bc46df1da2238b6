"""``interlingua explain``: how a request would be handled, or was handled, and why."""

import asyncio
import os
import re
import sys
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec

from gateway.cli.admin_client import AdminClient
from gateway.cli.option_types import SENT_KEY, NumberRange
from gateway.config.errors import ConfigError
from gateway.config.loader import load_config
from gateway.config.schema import Config
from gateway.explain.dry_run import run_dry
from gateway.explain.report import ExplainRequest, Explanation
from gateway.explain.report_text import format_explanation
from gateway.explain.sample_requests import PartialRequest, complete_request
from gateway.observability.record import ignore_record
from gateway.pipeline.services import GatewayServices
from gateway.pipeline.shadow import ShadowManager
from gateway.ratelimit.counters import CounterRegistry
from gateway.runtime.snapshot import ConfigSnapshot
from gateway.terminal import print_text
from protocols.core.json_text import decode_json

_ADMIN_URL: Final = re.compile(r"https?://[^/]+/?")


@click.command("explain")
@click.argument("source")
@click.option("--id", "id_", help="Show the recorded explanation of this request.")
@click.option("--model", help="The requested model, as a client names it.")
@click.option("--path", help="The request's path; by default one of the protocol's.")
@click.option("--protocol", help="The protocol; by default the path's or the first listener's.")
@click.option("--listener", help="A listener's address; by default the first with the path.")
@click.option("--method", default="POST", show_default=True)
@click.option("--key", help="The name of the request's API key.")
@click.option("--header", "headers", multiple=True, help="NAME: VALUE; may be repeated.")
@click.option("--peer", default="127.0.0.1", show_default=True, help="The client's address.")
@click.option("--body", type=click.File("rb"), help="A file, or -; by default a sample body.")
@click.option("--stream", is_flag=True, help="Request a stream.")
@click.option(
    "--random",
    type=NumberRange(0, 1, max_open=True),
    default=0.5,
    show_default=True,
    help="The random number for traffic splits and shares.",
)
@click.option(
    "--admin-key",
    type=SENT_KEY,
    envvar="INTERLINGUA_ADMIN_KEY",
    help="The admin listener's key; prefer the environment variable INTERLINGUA_ADMIN_KEY.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
def explain_command(source: str, *, as_json: bool, **arguments: Any) -> None:
    """Explain how a gateway handles a request.

    SOURCE is a configuration file: nothing is sent, started or bound. Or it is the URL of a running
    gateway's admin listener: the explanation then shows the current state of the workers, and
    nothing is sent to them; this needs the request's --path and --body.

    Exit codes: 0 explained, 1 the gateway would reject the request, 2 wrong usage, an invalid file,
    or no response.
    """
    body = arguments["body"]
    partial = PartialRequest(
        arguments["model"],
        arguments["path"],
        arguments["protocol"],
        body and body.read(),
        arguments["stream"],
    )
    request = ExplainRequest(
        path=partial.path or "/",
        method=arguments["method"].upper(),
        headers=dict(map(_parse_header, arguments["headers"])),
        base64=partial.body or b"",
        key=arguments["key"],
        peer=arguments["peer"],
        listener=arguments["listener"],
        random=arguments["random"],
    )
    if _ADMIN_URL.fullmatch(source):
        explanation = _query_admin(
            source.rstrip("/"), request, partial, arguments["id_"], arguments["admin_key"]
        )
    elif arguments["id_"] is not None:
        raise click.UsageError("--id needs the URL of an admin listener")
    else:
        explanation = _explain_offline(_load_config(source), request, partial)
    if as_json:
        print_text(msgspec.json.format(msgspec.json.encode(explanation)))
    else:
        print_text(format_explanation(explanation), nl=False)
    answer = explanation.answer
    sys.exit(1 if explanation.dry_run and answer is not None and answer.error else 0)


def _parse_header(header: str) -> tuple[str, str]:
    name, colon, value = header.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"--header {header!r}: write NAME: VALUE")
    return name.strip(), value.strip()


# --- from a file ----------------------------------------------------------------------------------


def _load_config(file: str) -> Config:
    try:
        return load_config(file, env=os.environ, insecure=True)
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        print_text(str(error), err=True)
        sys.exit(2)


def _explain_offline(
    config: Config, request: ExplainRequest, partial: PartialRequest
) -> Explanation:
    services = GatewayServices(
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
        new_id=lambda: "explained",
        draw=lambda: request.random,
        observe_request=ignore_record,
        shadow_manager=ShadowManager(lambda: 0.0),
        counter_registry=CounterRegistry(lambda: 0.0, lambda: 0.0),
    )

    async def run() -> Explanation:
        servers = ConfigSnapshot(config, services).handlers_by_address
        return await run_dry(complete_request(request, partial, servers), servers, services.clock)

    try:
        return asyncio.run(run())
    except LookupError as error:
        raise click.UsageError(str(error.args[0])) from None


# --- from a running gateway -----------------------------------------------------------------------


def _query_admin(
    url: str, request: ExplainRequest, partial: PartialRequest, id_: str | None, key: str | None
) -> Explanation:
    """The explanation from the admin listener. Raises UsageError if there is none."""
    client = AdminClient(f"{url}/-/explain", key, "explanation")
    if id_ is not None:
        response = client.get(f"/{quote(id_)}")
    elif partial.path is None or partial.model or partial.protocol or partial.stream:
        raise click.UsageError("for a running gateway, give --id, or --path and --body")
    else:
        response = client.post(msgspec.json.encode(request))
    try:
        return decode_json(response, kind=Explanation)
    except msgspec.DecodeError:
        raise client.unexpected(HTTPStatus.OK) from None

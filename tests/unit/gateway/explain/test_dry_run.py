"""Dry runs: parts that the golden cases do not cover."""

from msgspec import Raw

from gateway.cli.built_in import read_built_in_config
from gateway.config.loader import load_text
from gateway.explain.dry_run import ServersByListener, run_dry
from gateway.explain.report import (
    ExplainRequest,
    Explanation,
)
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot

CONFORMANCE, _ = read_built_in_config("conformance")


def build_handlers(text: str = CONFORMANCE.partition("\nkeys:")[0]) -> ServersByListener:
    env = {"PORT": "0", "ALONE_PORT": "0"}
    return ConfigSnapshot(
        load_text(text, "test.yaml", env=env), build_services()
    ).handlers_by_address


async def explain_dry_run(
    question: ExplainRequest, handlers: ServersByListener | None = None
) -> Explanation:
    return await run_dry(question, handlers or build_handlers(), lambda: 0.0)


async def test_dry_run_does_not_execute_stop_and_tokenize() -> None:
    handlers = build_handlers()
    paths = {
        (one.task, mount.prefix + one.path.replace("{model}", "mock")): mount.adapter.name
        for server in handlers.values()
        for mount in server.path_router.mounts
        for one in mount.adapter.endpoints
        if one.task in {"stop", "tokenize"}
    }

    assert {task for task, _ in paths} == {"stop", "tokenize"}

    for (task, path), name in paths.items():
        dry_run = await explain_dry_run(ExplainRequest(path=path, body=Raw(b"{}")), handlers)
        assert (dry_run.task, dry_run.protocol, dry_run.answer) == (task, name, None)
        assert not dry_run.requested_model


async def test_body_over_the_limit_is_rejected_with_413() -> None:
    small = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
limits: {body: 1KiB}
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v1/completions", base64=b"x" * 1025), build_handlers(small)
    )

    assert dry_run.answer is not None
    assert (dry_run.answer.status, dry_run.answer.error) == (413, "RequestTooLarge")


async def test_listeners_with_equal_addresses_are_numbered() -> None:
    two = """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai]}
  - {address: "127.0.0.1:0", protocols: [ovms]}
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v3/models", method="GET"), build_handlers(two)
    )

    assert dry_run.listener == "127.0.0.1:0 (2)"

"""A gateway on a real socket, started by the same class as ``interlingua serve``."""

import functools
import gc
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from hypothesis import settings
from msgspec import Struct
from msgspec.structs import replace

from gateway.cli.built_in import read_built_in_config
from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests import time_limits

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")  # make verify: --hypothesis-profile=thorough

# httpx reads the file of CA certificates for each client (12 to 40 ms); here all clients share it.
pytest.MonkeyPatch().setattr(
    "httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context)
)

HERE = Path(__file__).parent
CONFORMANCE, _ = read_built_in_config("conformance")
MOCK = CONFORMANCE.partition("\nkeys:")[0]
"""The same without keys."""
ANYWHERE = {"PORT": "0", "ALONE_PORT": "0"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the property tests: with 2,000 examples they may take longer than one case."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.properties)
            item.add_marker(pytest.mark.timeout(1200))


HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = (
    [] if HAS_TORCH else ["*/torch", "*/*/torch", "*/test_worker.py", "bench_engine/*"]
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    if not HAS_TORCH:
        terminalreporter.write_line("torch isn't installed: the local engine was not tested")


def pytest_collection() -> None:
    """Collect no garbage while tests are imported: hardly anything of it is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze what was imported, so that collecting garbage after each file is cheap."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Collect garbage after each file, so that what it left open is reported there."""
    yield
    if getattr(nextitem, "path", None) != item.path:
        gc.collect()
        plugin = item.config.pluginmanager.get_plugin("unraisableexception")
        assert plugin is not None
        plugin.pytest_runtest_teardown(item)


class FailureReporter:
    """Prints a failure when it happens, not only at the end of the run."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.when} of {report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist have no terminal; the process that has one prints their failures."""
    config.pluginmanager.register(time_limits)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):
        config.pluginmanager.register(FailureReporter(terminal))


class RunningGateway(Struct):
    """A gateway that serves: its URL, its insides, and what it recorded of each exchange."""

    url: str
    app: Gateway
    records: list[RequestRecord]
    http: httpx.AsyncClient
    admin: str
    """The admin listener's URL, where it has one; else the last listener's."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


Serve = Callable[[str], Awaitable[RunningGateway]]


@asynccontextmanager
async def run_gateways() -> AsyncIterator[Serve]:
    """Starts gateways from configurations; stops them all at the end."""
    running: list[RunningGateway] = []

    async def start(text: str) -> RunningGateway:
        records: list[RequestRecord] = []
        outside = replace(build_services(), observe_request=records.append)
        app = Gateway(load_text(text, "test.yaml", env=os.environ | ANYWHERE), outside)
        urls = await app.start()
        http = httpx.AsyncClient(base_url=urls[0], timeout=30)
        one = RunningGateway(urls[0], app, records, http, urls[-1])
        running.append(one)
        return one

    try:
        yield start
    finally:
        for one in running:
            await one.http.aclose()
            await one.app.stop()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts gateways that serve for one test."""
    async with run_gateways() as start:
        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve_module() -> AsyncIterator[Serve]:
    """Starts gateways that serve for all tests of a module.

    These tests run in the module's event loop: ``@pytest.mark.asyncio(loop_scope="module")``.
    """
    async with run_gateways() as start:
        yield start


@pytest.fixture
async def mock(serve: Serve) -> RunningGateway:
    """The gateway of the conformance cases, over the scripted echo; it asks for no key."""
    return await serve(MOCK)

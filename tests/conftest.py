"""A gateway on a real socket, started by the same class as ``interlingua serve``."""

import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from msgspec import Struct
from msgspec.structs import replace

from gateway.cli.serve import read_built_in_config
from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("thorough" if os.environ.get("CI") else "quick")

HERE = Path(__file__).parent
CONFORMANCE, _ = read_built_in_config("conformance")
MOCK = CONFORMANCE.partition("\nkeys:")[0]
"""The same without keys."""
ANYWHERE = {"PORT": "0", "ALONE_PORT": "0"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A law that is tried 2,000 times may take longer than one case."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.timeout(1200))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: collecting at the end of each file is cheap then."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """What a file's tests left open is found there, and not by the collector in another file."""
    yield
    if getattr(nextitem, "path", None) != item.path:
        gc.collect()
        found = item.config.pluginmanager.get_plugin("unraisableexception")
        assert found is not None
        found.pytest_runtest_teardown(item)


class Told:
    """Tells a failure when it happens: whoever watches a long run need not wait for its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.when} of {report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist have no terminal; what fails there is told by the process that has one."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):
        config.pluginmanager.register(Told(terminal))


class Running(Struct):
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


Serve = Callable[[str], Awaitable[Running]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts gateways from configurations; stops them all at the end."""
    running: list[Running] = []

    async def start(text: str) -> Running:
        records: list[RequestRecord] = []
        outside = replace(build_services(), observe_request=records.append)
        app = Gateway(load_text(text, "test.yaml", env=os.environ | ANYWHERE), outside)
        urls = await app.start()
        http = httpx.AsyncClient(base_url=urls[0], timeout=30)
        one = Running(urls[0], app, records, http, urls[-1])
        running.append(one)
        return one

    yield start
    for one in running:
        await one.http.aclose()
        await one.app.stop()


@pytest.fixture
async def mock(serve: Serve) -> Running:
    """The gateway of the conformance cases, over the scripted echo; it asks for no key."""
    return await serve(MOCK)

"""Fixtures that start a gateway on a real socket, and settings of every test run.

The gateway is started by the same class as ``interlingua serve``.
"""

import asyncio
import functools
import gc
import importlib.util
import os
import sys
import zlib
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
from gateway.config.loader import LoadedConfig, load_bytes
from gateway.config.schema import Config
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests import time_limits

settings.register_profile("few", max_examples=25, deadline=None)  # make quick
settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")  # make verify passes --hypothesis-profile=thorough

# httpx reads the CA certificates for each client (12 to 40 ms); here all clients share them.
pytest.MonkeyPatch().setattr(
    "httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context)
)

HERE = Path(__file__).parent
CONFORMANCE, _ = read_built_in_config("conformance")
MOCK = CONFORMANCE.partition("\nkeys:")[0]
"""The configuration of the conformance cases without API keys."""
ANY_FREE_PORT = {"PORT": "0", "ALONE_PORT": "0"}


def find_conformance_prefix(protocol: str) -> str:
    """Return the path prefix of a protocol's default options in that configuration."""
    return f"/{protocol}" if f"{{name: {protocol}, prefix: /{protocol}}}" in CONFORMANCE else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs a sample of the selected tests."""
    parser.addoption(
        "--one-in", type=int, default=1, help="run one test of so many, always the same"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the property tests: with 2,000 examples they may take longer than one case.

    The others of ``make properties`` are marked, too, so that one run has them all.
    """
    if (size := config.getoption("--one-in")) > 1:
        left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % size]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not zlib.crc32(item.nodeid.encode()) % size]
    check_marked_files(items)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.properties)
            item.add_marker(pytest.mark.timeout(1200))
        elif item.nodeid.startswith(("tests/property/", "tests/schema/")):
            item.add_marker(pytest.mark.properties)


@functools.cache
def read_source(path: Path) -> str:
    return path.read_text("utf-8")


def check_marked_files(items: list[pytest.Item]) -> None:
    """``make slow`` and ``make properties`` find their tests' files by these texts."""
    for item in items:
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if is_property and "\nfrom hypothesis import" not in read_source(item.path):
            message = f"{item.nodeid}: import given from hypothesis in this file"
            raise pytest.UsageError(message)
        if (
            item.get_closest_marker("slow") is not None
            and not item.nodeid.startswith("tests/cross/")
            and "mark.slow" not in read_source(item.path)
        ):
            message = f"{item.nodeid}: mark slow tests in their own file, by pytest.mark.slow"
            raise pytest.UsageError(message)


SLOW_IMPORTS = frozenset({"torch", "transformers"})
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = (
    []
    if HAS_TORCH
    else [
        "*/torch",
        "*/*/torch",
        "*/test_worker.py",
        "bench_engine/*",
        "*/test_simulated_error_rates.py",  # numpy comes with torch
    ]
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print that the tests of the local engine were skipped."""
    if not HAS_TORCH:
        terminalreporter.write_line("torch isn't installed: the local engine was not tested")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Only tests of the local engine and of Ray import torch when they are collected."""
    loaded = SLOW_IMPORTS & sys.modules.keys()
    report = yield
    is_engine_test = not isinstance(collector, pytest.Module) or not {"torch", "ray"}.isdisjoint(
        collector.path.parts
    )
    if SLOW_IMPORTS & sys.modules.keys() - loaded and not is_engine_test:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} imports torch; import it in a fixture"
    return report


def pytest_collection() -> None:
    """Collect no garbage while tests are imported: hardly any of it is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze the imported modules, so that a collection after each file is cheap."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Collect garbage after each file, so that resources which it left open are reported there.

    What is alive then, such as libraries that a test imported, is not searched again.
    """
    yield
    if getattr(nextitem, "path", None) != item.path:
        gc.collect()
        plugin = item.config.pluginmanager.get_plugin("unraisableexception")
        assert plugin is not None
        plugin.pytest_runtest_teardown(item)
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Have pytest's last collection search everything."""
    gc.unfreeze()


class FailureReporter:
    """Prints each failure when it happens, and not only at the end of the run."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.when} of {report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter in the process that has a terminal; xdist's workers have none."""
    config.pluginmanager.register(time_limits)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):
        config.pluginmanager.register(FailureReporter(terminal))


class RunningGateway(Struct):
    """A running gateway: its URL, the object itself, and a record of each request."""

    url: str
    app: Gateway
    records: list[RequestRecord]
    http: httpx.AsyncClient
    admin: str
    """The admin listener's URL, or the last listener's if there is no admin listener."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


Serve = Callable[[str], Awaitable[RunningGateway]]


@functools.lru_cache(16)
def load_once(text: str, environment: frozenset[tuple[str, str]]) -> LoadedConfig:
    """The configuration with its files; most tests of a module start the same one."""
    return load_bytes(text.encode(), "test.yaml", env=dict(environment) | ANY_FREE_PORT)


def load_config(text: str) -> Config:
    """The configuration: read again if it names files, since they may have changed."""
    environment = frozenset(
        (name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    )
    loaded = load_once(text, environment)
    return load_once.__wrapped__(text, environment).config if loaded.files else loaded.config


@asynccontextmanager
async def run_gateways() -> AsyncIterator[Serve]:
    """Start gateways from configuration text; stop all of them at the end."""
    running: list[RunningGateway] = []

    async def start(text: str) -> RunningGateway:
        """Start one, and wait until its local models are loaded or have failed."""
        records: list[RequestRecord] = []
        services = replace(build_services(), observe_request=records.append)
        app = Gateway(load_config(text), services)
        urls = await app.start()
        while app.list_loading_models():  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0.02)
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
    """Start gateways that run for one test."""
    async with run_gateways() as start:
        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve_module() -> AsyncIterator[Serve]:
    """Start gateways that run for all tests of a module.

    These tests run in the module's event loop: ``@pytest.mark.asyncio(loop_scope="module")``.
    """
    async with run_gateways() as start:
        yield start


@pytest.fixture
async def mock(serve: Serve) -> RunningGateway:
    """The gateway of the conformance cases, with the scripted echo backend and without API keys."""
    return await serve(MOCK)

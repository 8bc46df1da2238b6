"""The gateway and the Node.js clients, as given by ``make clients``."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gateway() -> str:
    """The URL of the gateway with scripted responses."""
    if url := os.environ.get("SCRIPTED_URL"):
        return url
    raise pytest.UsageError("SCRIPTED_URL is not set: run these tests by `make clients`")


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder of the installed packages."""
    folder = Path(os.environ.get("NODE_CLIENTS", "")) / "node_modules"
    if not folder.is_dir():
        pytest.skip(f"the clients for Node.js are not installed in {folder}")
    return folder


@pytest.fixture(scope="session")
def node() -> str:
    """The node program."""
    if (program := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    return program

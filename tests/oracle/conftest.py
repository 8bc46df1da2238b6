"""Starts the real Triton server once."""

import os
from collections.abc import Iterator

import pytest

from tests.oracle.triton_server import TritonUnavailableError, run_triton


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's URL. Without a server the tests are skipped, or fail where they must run."""
    try:
        with run_triton(tmp_path_factory.mktemp("triton")) as url:
            yield url
            return
    except TritonUnavailableError as absent:
        reason = f"no real Triton server: {absent}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)

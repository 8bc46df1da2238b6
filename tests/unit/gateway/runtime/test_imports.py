"""A gateway without admin listener, JWT keys and tracing does not import their modules."""

import subprocess
import sys

UNUSED = {"aiohttp", "httpx", "jwt", "opentelemetry", "prometheus_client", "redis", "rich", "torch"}


def test_minimal_gateway_imports_no_unused_library() -> None:
    program = (
        "import sys, gateway.cli, gateway.runtime.gateway, backends.pool.pool, protocols.openai; "
        f"print(*({UNUSED!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == []

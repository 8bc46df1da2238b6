"""A process imports only what it needs."""

import subprocess
import sys

UNUSED = {"aiohttp", "httpx", "jwt", "opentelemetry", "prometheus_client", "redis", "rich", "torch"}


def run_program(program: str) -> list[str]:
    """Run a program in a Python of its own, and return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_minimal_gateway_imports_no_unused_library() -> None:
    """It has no admin listener, no JWT keys and no tracing."""
    printed = run_program(
        "import sys, gateway.cli.serve, gateway.runtime.gateway, backends.pool.pool;"
        "import protocols.openai;"
        f"print(*({UNUSED!r} & set(sys.modules)))"
    )

    assert printed == []


def test_command_imports_no_other_command() -> None:
    printed = run_program(
        "import sys; from gateway.cli import main;"
        "main(['schema'], standalone_mode=False);"
        "print('', *(name for name in sys.modules if name.startswith('gateway.cli.')))"
    )

    commands = {name for name in printed if name.startswith("gateway.cli.")}
    assert commands == {"gateway.cli.config", "gateway.cli.models"}

"""A real Triton server on this machine: the wheel's binary, its Python backend, our models."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.ports import reserve_port

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".venv-triton"
START = 60.0
"""Seconds until it must be ready; it takes about 6."""
STOP = 20.0

MODELS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm_like": ("vllm_like", {}),
    "vllm_fails_first": ("vllm_like", {"fail_at": "0"}),
    "vllm_fails_third": ("vllm_like", {"fail_at": "2"}),
    "trt_like": ("trt_like", {}),
    "mock_llm": ("mock_llm", {}),
    "patient": ("patient", {}),
}
"""The served models: the fixture of each, and its parameters."""


class TritonUnavailableError(Exception):
    """No Triton server is available; the message has the reason."""


@contextmanager
def run_triton(where: Path) -> Iterator[str]:
    """Run Triton in the folder ``where``; yield its URL. Raises TritonUnavailableError."""
    packages = next(iter(ENVIRONMENT.glob("lib/python3.*/site-packages/pytriton")), None)
    if packages is None:
        raise TritonUnavailableError(
            f"none is installed in {ENVIRONMENT.name}; make oracle does it"
        )
    minor = packages.parent.parent.name
    install_models(where / "models")
    install_backend(where / "backends", packages / "tritonserver", minor.removeprefix("python"))
    port = reserve_port()
    with (where / "log").open("wb") as log:
        process = subprocess.Popen(
            build_command(packages / "tritonserver" / "bin" / "tritonserver", where, port),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=build_environment(packages.parent),
            start_new_session=True,
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", where / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            stop_server(process)


def install_models(repository: Path) -> None:
    """Write the model repository."""
    for name, (fixture, parameters) in MODELS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(HERE / "models" / f"{fixture}.py", version / "model.py")
        text = (HERE / "models" / f"{fixture}.pbtxt").read_text("utf-8")
        for key, value in parameters.items():
            text += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        (repository / name / "config.pbtxt").write_text(text, "utf-8")


def install_backend(backends: Path, wheel: Path, minor: str) -> None:
    """Install the wheel's Python backend with the stub for this Python.

    Raises TritonUnavailableError.
    """
    stub = wheel / "python_backend_stubs" / minor / "triton_python_backend_stub"
    if not stub.is_file():
        raise TritonUnavailableError(f"its Python backend has no part for Python {minor}")
    shutil.copytree(wheel / "backends" / "python", backends / "python")
    shutil.copy(stub, backends / "python")


def build_command(binary: Path, where: Path, port: int) -> list[str]:
    """Build the command line; models are loaded only on request."""
    return [
        str(binary),
        f"--model-repository={where / 'models'}",
        f"--backend-directory={where / 'backends'}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in MODELS),
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
        f"--backend-config=python,shm-region-prefix-name=oracle_{os.getpid()}",
    ]


def build_environment(packages: Path) -> dict[str, str]:
    """Return the environment with the library paths of the wheel and of this Python."""
    command = [str(ENVIRONMENT / "bin" / "python"), "-c"]
    command += ["import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"]
    library = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    paths = os.pathsep.join([str(packages / "nvidia_pytriton.libs"), library])
    bin_ = os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ.get("PATH", "")])
    return {"LD_LIBRARY_PATH": paths, "PYTHONPATH": str(packages), "PATH": bin_}


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server is ready. Raises TritonUnavailableError."""
    until = time.monotonic() + START
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/v2/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    end = log.read_text("utf-8", "replace").strip().splitlines()[-5:]
    raise TritonUnavailableError("\n  ".join(["it does not start; the end of its log:", *end]))


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and the processes of its models, which are in its session."""
    process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

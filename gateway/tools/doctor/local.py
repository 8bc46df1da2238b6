"""Whether models in this process have what they need."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from gateway.config import Config, Torch
from gateway.tools.doctor.finding import Finding, bad, ok, warn


def examine(config: Config) -> Iterator[Finding]:
    """Each local model's device and memory; nothing is imported where there is none."""
    for name, backend in config.backends.items():
        if isinstance(backend, Torch):
            yield from _model(name, backend)


def _model(name: str, model: Torch) -> Iterator[Finding]:
    missing = [one for one in ("torch", "transformers") if importlib.util.find_spec(one) is None]
    if missing:
        said = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        yield bad(name, said, "pip install 'interlingua[torch]'")
        return
    torch = importlib.import_module("torch")
    try:
        yield _device(name, model, torch)
    except RuntimeError as error:
        said = f"the device {model.device} can't be had: {str(error).splitlines()[0]}"
        yield bad(name, said, "write another device, or mend the driver")


def _device(name: str, model: Torch, torch: Any) -> Finding:
    """Raises RuntimeError."""
    kind = model.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind if model.device == "auto" else model.device)
    torch.zeros(1, device=device)
    if kind != "cuda":
        return ok(name, f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads")
    free, whole = torch.cuda.mem_get_info(device)
    said = f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}"
    left = f"{free >> 20:,} of {whole >> 20:,} MiB free"
    if free < model.memory:
        mend = "stop what else runs there, or lower its `memory`"
        return warn(name, f"{said}: {left}, less than its `memory`", mend)
    return ok(name, f"{said}: {left}")

"""Where requests are answered. To add a backend: one module, one line below.

A kind maps to ``module:class`` and not to the class, so that a gateway without a local model never
imports torch.
"""

BACKENDS = {
    "echo": "backends.echo:EchoBackend",
    "pool": "backends.pool:PoolBackend",
    "torch": "backends.torch.backend:TorchBackend",
}

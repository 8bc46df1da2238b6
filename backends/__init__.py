"""The backends, which answer requests. A new backend needs one module and one line below.

A kind maps to ``module:class``, not to the class, so that a gateway without a local model never
imports torch.
"""

BACKENDS = {
    "echo": "backends.echo:EchoBackend",
    "pool": "backends.pool.pool:PoolBackend",
    "torch": "backends.torch.backend:TorchBackend",
}

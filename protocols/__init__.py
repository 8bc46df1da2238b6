"""The wire protocols of the gateway. A new protocol needs one folder and one line below.

A name maps to ``module:class`` instead of the class, so that a gateway imports only the protocols
that its configuration uses. The class takes a profile (a release or flavour of the protocol; the
first of its ``profiles`` is the default). An instance is a ``ClientAdapter`` of
``protocols.core.interfaces`` if clients can use the protocol, and an ``UpstreamAdapter`` if workers
can; most are both.
"""

PROTOCOLS = {
    "openai": "protocols.openai:OpenAI",
    "databricks": "protocols.databricks:Databricks",
    "triton": "protocols.triton:Triton",
    "mindie": "protocols.mindie:MindIE",
    "ovms": "protocols.ovms:OVMS",
    "tgi": "protocols.tgi:TGI",
    "ollama": "protocols.ollama:Ollama",
    "anthropic": "protocols.anthropic:Anthropic",
    "cohere": "protocols.cohere:Cohere",
}
"""``module:class`` of each adapter, by the protocol's name."""

"""The dialects this gateway speaks. To add one: one module, one line below.

A name maps to ``module:class`` and not to the class, so that a gateway imports only the dialects
that its configuration mounts. A class is called with a profile (a release or flavour of the
dialect; the first of its ``profiles`` is the default). What it gives is a ``Dialect`` of
``protocols.core.interfaces`` where clients may speak it, and a ``WorkerDialect`` where workers do; most
are both.
"""

DIALECTS = {
    "openai": "protocols.openai:OpenAI",
    "databricks": "protocols.databricks:Databricks",
    "triton": "protocols.triton:Triton",
    "mindie": "protocols.mindie:MindIE",
    "ovms": "protocols.ovms:OVMS",
    "tgi": "protocols.tgi:TGI",
}

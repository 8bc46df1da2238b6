"""Databricks: Foundation Model APIs and model serving.

endpoints   what clients call: routes and the adapter
requests    client bodies to the internal request; the order of roles
params      parameter tables
responses   the style of unary and streaming responses
upstream    requests to workers, their parameters and errors; pass-through
listing     the workspace API's view of the catalog
errors      statuses and error codes
openapi     schemas of requests and responses
"""

from protocols.databricks.endpoints import Databricks

__all__ = ["Databricks"]

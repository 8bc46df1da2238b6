"""Databricks: Foundation Model APIs and model serving.

dialect    the paths
requests   a client's body into the internal request; who may speak when in ``roles``
tables     the scalar parameters
answers    whole answers and streams
worker     requests for workers, and their errors; what endpoints take in ``profiles``
relay      a client's own bytes for an endpoint
listing    the workspace API's view of the catalog
errors     statuses and error codes
"""

from protocols.databricks.endpoints import Databricks

__all__ = ["Databricks"]

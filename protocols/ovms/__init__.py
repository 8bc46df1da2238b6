"""OpenVINO Model Server: chat, completions and embeddings under ``/v3``.

dialect    the paths
requests   a client's body into the internal request; messages and tools in ``messages``
tables     the scalar parameters, and the server's words for a wrong one
answers    whole answers and streams
worker     requests for workers, and their errors; what each release takes in ``profiles``
relay      a client's own bytes for a server
errors     statuses and sentences
"""

from protocols.ovms.endpoints import OVMS

__all__ = ["OVMS"]

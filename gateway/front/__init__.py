"""What turns sockets into a request and a sink (``gateway.seam``)."""

"""The data path's HTTP/1.1 client: an Upstream over sockets of our own.

origin       a worker's URL, taken apart once     dialling    a connection to it, in time
connection   one connection, one answer at a time  client      who keeps connections for whom
"""

from backends.http.client import AsyncioHttpClient

__all__ = ["AsyncioHttpClient"]

"""The data path's HTTP/1.1 client.

interfaces  WorkerConfig, HttpClient and the reader of a response
client      a connection pool per worker: keep-alive, connect, request heads
connection  one connection, one response at a time
"""

from backends.http.client import AsyncioHttpClient

__all__ = ["AsyncioHttpClient"]

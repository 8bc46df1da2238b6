"""The HTTP/1.1 server in front of clients.

listener          one listening address over asyncio sockets: limits, drain, close
sockets           listening sockets and their TLS certificates, which a reload can replace
connection        one client connection: states, timeouts, pipelining
parser            bytes to requests
response          responses to bytes: heads, chunked bodies, write batches
overload          limits of connections, and of the time of bodies
turn_slices       what is done in one turn of the event loop
openapi           the OpenAPI document of a listener
"""

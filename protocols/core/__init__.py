"""The vocabulary: what dialects, backends and the router share. No I/O; stdlib and msgspec only.

types       the one internal request (request) and the events that answer it (events)
errors      the one tree of everything that can go wrong
loss        what a translation could not carry, and how that is found out
ports       what a dialect and a backend must offer
catalog     what the gateway serves, as a dialect's listing endpoints see it
context     what belongs to one exchange and not to the client's request: its id, its deadline
aggregate   events to one whole answer
sse         server-sent events, bytes in and bytes out
histogram   how measured values lie
"""

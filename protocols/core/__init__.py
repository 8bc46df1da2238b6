"""The internal model that protocols, backends and the router share. No I/O; msgspec only.

request       the one internal request
events        the events that answer it
errors        everything that can go wrong
loss          unsupported parameters of a translation, and how they are found
aggregate     events to one unary response
sse           server-sent events, parsed and written
stop_strings  the filter for stop strings
catalog       the models as listing endpoints see them
units         scalar types of settings: durations, sizes, rates, shares, secrets, URLs
restricted    an adapter without parameters that workers do not support
interfaces    ClientAdapter, UpstreamAdapter and their optional capabilities
"""

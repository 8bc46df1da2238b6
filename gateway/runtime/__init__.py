"""The running gateway.

gateway    start, reload, drain and stop; the listeners and backends
build      configuration sections to runtime objects
snapshot   everything that one configuration makes; unchanged backends are reused
reload     reload the configuration: on SIGHUP, on a changed file, from the admin API
telemetry  wire metrics, access log, usage rows and traces to the request handler
handover   pass listening sockets to a new process for an upgrade without downtime
process    signals, event loop, garbage collector, file descriptor limit
"""

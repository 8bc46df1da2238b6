"""The running gateway.

gateway        start, reload and stop; the listeners and backends
start_up       backends and certificates that must be ready before
shared_limits  rate limits that several gateways share
shutdown       graceful shutdown: signals, drain of running requests
build          configuration sections to runtime objects
snapshot       everything that one configuration makes; unchanged backends are reused
reload         reload the configuration: on SIGHUP, on a changed file, from the admin API
telemetry      wire metrics, access log, usage rows and traces to the request handler
handover       pass listening sockets to a new process for an upgrade without downtime
process        event loop, garbage collector, file descriptor limit
"""

"""A pool of remote workers that speak one protocol.

pool              choose a worker, run the attempts of a request, retry
attempt           one request to one worker: forwarded headers, events
attempt_timeouts  its timeouts
workers           the workers, their slots, the queue of waiting requests
worker_state      one worker: health, slots, latency
selection_report  reports the selection of a worker: explain, and dry runs
load_balancing    the policies that choose a worker
circuit_breaker   circuit breaker, outlier ejection, slow start, latency averages
health_check      active health checks
retry             which failures are retried, and the retry budget
worker_metadata   ask workers about their models before the first request
side_requests     short requests of the pool itself, also those that cancel a worker's request
discovery         the list of workers: static, from a file, from the admin API
dns_discovery     workers from DNS: the addresses of a host, or the targets of a service
dns_resolver      queries of nameservers, by dnspython
settings          the pool's settings
metrics           the pool's counters
"""

"""Rate limits per API key: requests, tokens, concurrency, daily budgets.

limiter       reserve before a request, settle after it
reservation   the limits of one key, what one request takes of them, and an estimate of its tokens
counters      the usage of all limits, which outlives a configuration
buckets       token bucket, daily budget, concurrency slots
leases        limits that several gateways share: each process leases parts of them
redis_leases  the store of leases in Redis (redis_leases.lua)
"""

"""Rate limits per API key: requests, tokens, concurrency, daily budgets.

limiter        reserve before a request, settle after it; counters per key
buckets        token bucket, daily budget, concurrency slots
redis_limiter  limits that several gateways share: quota leased from Redis (redis_leases.lua)
"""

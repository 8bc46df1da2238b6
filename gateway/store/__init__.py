"""Stores the responses that later requests refer to: in memory, in an SQLite file, or in Redis.

response_store  the interface, and the store in memory
sqlite_store    an SQLite file, for the processes of one machine
redis_store     Redis, for several gateways
references      loads what requests refer to, within the limits of their bodies

Every store is bounded in count, bytes and time, and separates its owners: the API keys.
"""

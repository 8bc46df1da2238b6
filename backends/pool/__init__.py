"""A pool of workers that speak one dialect.

backend   one request: a worker, its answer, and another worker where the first never began
roster    who may be asked now: free places, marks of absence, the queue
policy    which of those: pure
retry     whether to ask another: pure
watch     how long a worker may be silent
"""

from backends.pool.backend import PoolBackend

__all__ = ["PoolBackend"]

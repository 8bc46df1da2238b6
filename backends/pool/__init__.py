"""A pool of workers that speak one dialect.

backend    one request: a worker, its answer, and another worker where the first never began
attempt    one request at one worker: its answer as events
roster     who may be asked now: the workers, their free places, the queue
member     one worker, and what is known of it
probing    asking workers whether they are well
learning   asking workers about models, where a dialect has to know
stopping   telling workers to stop what nobody waits for any more
discovery  whom the pool consists of
watch      how long a worker may be silent
errand     a short request of the pool's own
settings   what a pool may be told

and, pure: policy (which worker), health (whether it may be asked), smooth (its latency), retry and
budget (whether to ask another).
"""

from backends.pool.pool import PoolBackend

__all__ = ["PoolBackend"]

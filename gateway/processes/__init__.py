"""One gateway that is several processes: they share its ports, and one more looks after them.

text        what is served, as every process reads it
shares      each process's part of the limits
ports       the ports that all of them bind
line        what the supervisor and a process tell each other
loops       the event loop that a process runs on
stopping    the wish that it stops
member      a process, as the supervisor sees it
serving     the process itself
supervisor  who starts, restarts, reloads and stops them
desk        the admin listener of all of them
merging     many processes' figures as one's
"""

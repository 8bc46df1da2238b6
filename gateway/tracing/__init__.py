"""What OpenTelemetry is told: spans of exchanges that are sampled, and figures of all of them.

parents   what a client says of a trace that its request is part of
names     the conventions' names, one table for each version of them
follow    exchanges as they come about: the hot path's part
spans     what is told of one that is over
figures   what all of them come to, by the conventions
sending   the thread that sends it all

Nothing but the last needs the network, and nothing but ``spans``, ``figures`` and it the extra.
Never a prompt or an answer.
"""

"""``interlingua replay``: sends recorded requests again, to another version, worker or gateway.

============ ===================================================================
selection    which requests of a recording are sent, and what they may cost
target       the configuration of the gateway that they are sent to
runner       sends them, and writes what came back in the format of recordings
============ ===================================================================
"""

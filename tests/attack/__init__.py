"""Attacks on a gateway that is a process of its own: what they cost it, and the other clients."""

"""A board of what a running gateway does, from its pages: ``counts`` reads, ``frame`` shows."""

from gateway.board.counts import Counts, Unreadable, read
from gateway.board.frame import Board, Frame

__all__ = ["Board", "Counts", "Frame", "Unreadable", "read"]

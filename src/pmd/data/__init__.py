"""Where rows come from."""

from pmd.data.stream import Stream, stream

__all__ = ["Stream", "stream"]

"""EventOverlap where DeepEP has it. Absolute imports, so that deep_ep.utils gives the same classes."""

from eprt.compat.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]

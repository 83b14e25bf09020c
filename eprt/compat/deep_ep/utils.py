"""Where DeepEP keeps EventOverlap. Absolute imports: under the name deep_ep.utils, too, these are the same classes."""

from eprt.compat.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]

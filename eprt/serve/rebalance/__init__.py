"""Rebalancing of a running server: when to plan, what to move, and its metrics."""

"""Tiers of service: who goes first, who is let in, and what each got (docs/tiers.md)."""

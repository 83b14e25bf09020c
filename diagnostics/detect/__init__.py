"""Which rank or link is slow: effects, scores, evidence and the report."""

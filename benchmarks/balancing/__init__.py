"""Balancing: plans beside EPLB, replica routing, and what moving experts costs."""

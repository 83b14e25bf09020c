"""Serving: engine, generation, overlap and the HTTP server."""

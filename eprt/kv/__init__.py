"""KV pages that travel between instances: how one rank reads another's. Knows nothing of requests."""

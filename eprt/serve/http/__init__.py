"""The HTTP side: connections, request bodies, routes and responses."""

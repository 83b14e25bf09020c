"""The cpu backend: dispatch and combine through shared memory inside a node and by messages between nodes."""

"""The wire between nodes: groups of ranks that share no memory, over TCP, or over memory at the pace of a network."""

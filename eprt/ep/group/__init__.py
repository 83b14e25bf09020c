"""Groups of ranks: membership, set-up collectives, shared windows, messages, and waits with deadlines."""

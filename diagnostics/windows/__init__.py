"""Windows of the log as arrays: matrices, sums over windows, and history."""

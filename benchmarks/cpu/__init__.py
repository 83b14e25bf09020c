"""CPU kernels beside torch."""

"""Simulated logs with known faults, for tests and benchmarks."""

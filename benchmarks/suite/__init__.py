"""The dated run of tests/gpu: who runs it, its record, and the tables of docs/gpu.md that are made from the record."""

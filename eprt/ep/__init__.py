"""Expert-parallel communication: the interface (api.py), its backends, groups of ranks, placements and migrations."""

"""The diagnosis log: its records, writing, indexing and reading."""

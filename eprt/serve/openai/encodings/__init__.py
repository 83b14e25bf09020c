"""Prompt encodings of models without a Jinja template, one module per model type."""

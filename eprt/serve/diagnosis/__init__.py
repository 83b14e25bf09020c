"""Diagnosis of a running server: collected windows, notices, the page and its metrics."""

"""Diagnosis: what it finds, in made-up and in running jobs, and what it costs."""

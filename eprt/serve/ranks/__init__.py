"""The ranks behind the frontend: launching, messages, one rank's loop, and their metrics."""

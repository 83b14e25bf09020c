"""Benchmarks, in folders by subject: `eprt bench --list` names each with what it needs."""

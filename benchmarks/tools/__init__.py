"""What benchmarks share: timing, reports, the catalogue of all of them. Knows no benchmark by name."""

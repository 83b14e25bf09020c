"""`python -m benchmarks.bench_internode`: the same program as `python -m benchmarks.ep.bench_internode`."""

import sys

from benchmarks.ep.bench_internode import main

if __name__ == "__main__":
    sys.exit(main())

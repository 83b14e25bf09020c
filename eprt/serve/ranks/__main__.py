"""`python -m eprt.serve.ranks R`: rank R of eprt's launcher, which writes its RankConfig to standard input.

The number is only for those who look at a list of processes. Knows no more.
"""

import sys

import msgspec

from eprt.serve.options import RankConfig
from eprt.serve.ranks.main import run_launched

if __name__ == "__main__":
    sys.exit(run_launched(msgspec.json.decode(sys.stdin.buffer.read(), type=RankConfig)))

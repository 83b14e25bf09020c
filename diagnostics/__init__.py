"""Which rank or link is slow, from the waits that every rank measures. Uses numpy only; knows no torch and no runtime.

    writer = WindowWriter("run/diagnose")             # rank 0 of a running job, once per window and rank
    writer.write(WindowRecord(...))
    eprt diagnose run/diagnose                        # anyone, during the run or after it

M[i][j] is the time rank i waited for rank j, per call. A high column j: rank j makes everyone wait. A high row i:
rank i waits for everyone. A high point (i, j): that link.
"""

from .detect.analysis import Finding
from .detect.report import STATE_NAMES, Report, analyse
from .detect.sightings import Outliers
from .detect.speeds import rank_speeds
from .log.events import ExpertRows, WindowRecord
from .log.reader import LogProblem, WindowLog, read_log
from .log.writer import WindowWriter
from .windows.expert_load import ExpertLoad
from .windows.matrices import WindowMatrices

__all__ = [
    "STATE_NAMES",
    "ExpertLoad",
    "ExpertRows",
    "Finding",
    "LogProblem",
    "Outliers",
    "Report",
    "WindowLog",
    "WindowMatrices",
    "WindowRecord",
    "WindowWriter",
    "analyse",
    "rank_speeds",
    "read_log",
]

"""`python -m eprt.compat.deep_ep`: the folder that redirects `import deep_ep`."""

import runpy
import subprocess
import sys

from eprt import env


def test_a_folder_on_the_path_redirects_the_import_in_any_process(capsys):
    runpy.run_module("eprt.compat.deep_ep", run_name="__main__")
    environment = env.without_mpi() | {"PYTHONPATH": capsys.readouterr().out.strip()}
    program = (
        "import importlib.util as u; assert u.find_spec('deep_ep')\n"
        "import deep_ep, eprt.compat.deep_ep; from deep_ep import Buffer, Config, EventOverlap\n"
        "assert deep_ep is eprt.compat.deep_ep and u.find_spec('deep_ep')\n"
        "from deep_ep.utils import EventOverlap as E\n"
        "assert E is EventOverlap and deep_ep.topk_idx_t.is_signed and Buffer.is_sm90_compiled()"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)

"""With this folder on PYTHONPATH `import deep_ep` imports eprt.compat.deep_ep: programs for DeepEP run unchanged.

`python -m eprt.compat.deep_ep` prints the folder.
"""

import sys

import eprt.compat.deep_ep

sys.modules["deep_ep"] = eprt.compat.deep_ep

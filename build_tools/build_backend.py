"""scikit-build-core, asked for by pip, with one check before it: torch, whose headers the native library needs.

pip downloads all that eprt needs, gigabytes with the wrong torch, before it begins to build; CMakeLists.txt would find
only then that the environment has no torch. Knows nothing of how the library is built.
"""

import os
import sysconfig

from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = (
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
)

_MESSAGE = (
    "eprt is built with the headers of torch, and the environment has none yet. Install it first, by exact version "
    "(pip install torch==2.13.0; for CPUs alone with --index-url https://download.pytorch.org/whl/cpu), then run the "
    "same command again"
)


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """pip asks this of isolated builds, which do not see the environment's packages but know where they are."""
    _require_torch()
    return build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    _require_torch()
    return build.get_requires_for_build_editable(config_settings)


def _require_torch() -> None:
    places = [os.path.join(sysconfig.get_path(kind), "torch") for kind in ("platlib", "purelib")]
    if not any(os.path.exists(os.path.join(place, "lib", "libtorch_cpu.so")) for place in places):
        raise SystemExit(f"error: {_MESSAGE}")

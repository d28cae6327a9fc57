"""Creates the environment that tests/sglang runs real SGLang in, on a CPU.

    python scripts/setup_sglang.py [FOLDER]

Needs Python 3.11 or newer on Linux. `make test-sglang` calls it. FOLDER (.venv-sglang) is left
alone if this script finished it before with the same pins and the same interpreter; otherwise it is
created anew. The last step imports what was installed.

SGLang's requirements bring kernels for GPUs along, some 5 GB beside torch's own. They are left out:
SGLang is installed without its requirements, and tests/sglang/constraints.txt lists the others."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.setup_vllm import ROOT, Environment, main

CONSTRAINTS = ROOT / "tests" / "sglang" / "constraints.txt"
PROGRAMS = ROOT / "tests" / "support" / "programs"
SGLANG = "sglang==0.5.23"
TORCH = ("torch==2.14.1", "torchvision==0.29.1")
CHECK = (
    "import os, sys; os.environ['SGLANG_USE_CPU_ENGINE'] = '1'; sys.path.append(sys.argv[1])"
    "; import sglang_kernels; sglang_kernels.install(); import torch, transformers, sglang;"
    " from sglang.srt.entrypoints.engine import Engine; print(f'SGLang {sglang.__version__},"
    " torch {torch.__version__}, transformers {transformers.__version__}')"
)


class SglangEnvironment(Environment):
    """Real SGLang without its kernels."""

    pins = (SGLANG, *TORCH)
    inputs = (CONSTRAINTS,)
    size = "some minutes and 7 GB"

    def fill(self, *options: object) -> str:
        """Installs torch, what SGLang imports and SGLang; the versions. SetupError: a step has
        failed."""
        self._install(*TORCH, step=f"install {' and '.join(TORCH)}")
        self._install("-r", CONSTRAINTS, "--no-deps", step=f"install what {SGLANG} imports")
        self._install(SGLANG, "--no-deps", step=f"install {SGLANG}")
        return self._run("import SGLang", [self.python, "-P", "-c", CHECK, PROGRAMS])


if __name__ == "__main__":
    sys.exit(main(SglangEnvironment, ".venv-sglang", sys.argv[1:]))

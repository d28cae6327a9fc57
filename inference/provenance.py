"""Where a measurement comes from: versions, commit, hardware and content hashes for the report.

It must not know what was measured; it only looks at the machine, the installed packages and the
files it is given."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.version import package_version


def environment(device: str | torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of `report.Provenance` that describe software and machine, by their names."""
    device = torch.device(device)
    return {
        "draftsmith_version": package_version(),
        "git_commit": git_commit(Path(__file__).resolve().parent),
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        "cpu_model": cpu_model(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the source tree around `folder`, with `-dirty` if tracked files differ; None
    outside git.

    A package installed below somebody else's repository (`.venv/lib/…`) is not part of it: only a
    tree that tracks this very folder counts."""
    if not _git(folder, "ls-files", "--", "."):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command in `folder`, empty if it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_model() -> str:
    """Processor name as the system gives it."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def text_sha256(text: str | None) -> str | None:
    """Hash of a text (chat template, resolved recipe), None for None."""
    return None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()

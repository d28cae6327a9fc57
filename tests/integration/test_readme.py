"""What README shows as Python runs as it stands, with the head that `make quickstart` leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = ROOT / "runs" / "quickstart" / "eagle3" / "export"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.integration
@pytest.mark.skipif(not HEAD.exists(), reason="`make quickstart` trains the head that README loads")
@pytest.mark.parametrize("code", BLOCKS)
def test_python_of_the_readme_runs_as_it_stands(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *text, acceptance_length = done.stdout.strip().splitlines()
    assert text and float(acceptance_length) > 1.5

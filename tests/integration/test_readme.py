"""What README and the tutorial show runs as it stands: Python with the head that `make quickstart`
leaves, and commands in a newcomer's folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs_commands import commands
from tests.support.engines import drafting_llm
from tests.support.newcomer import (
    MODEL,
    README,
    ROOT,
    TARGET,
    TUTORIAL,
    make_folder,
    own_commands,
    run,
)
from tests.support.tokenizers import byte_tokenizer

HEAD = ROOT / "runs" / "quickstart" / "eagle3" / "export"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


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


@pytest.fixture
def newcomer(tmp_path, monkeypatch, hub_cache) -> Path:
    hub_cache(MODEL, TARGET)
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.integration
@pytest.mark.slow
def test_commands_of_the_readme_run_as_they_stand(newcomer):
    for command in own_commands(README):
        run(command, newcomer)
    written = newcomer / "runs" / "qwen3-8b-eagle3"
    assert (written / "export" / "config.json").exists() and (written / "report.html").exists()


@pytest.mark.integration
@pytest.mark.slow
def test_commands_of_the_tutorial_run_as_they_stand(newcomer):
    """Those of the training and of its export are README's."""
    lines = [c for c in own_commands(TUTORIAL) if not c.startswith("accelerate")]
    assert len(lines) >= 7
    for command in lines:
        if "runs/qwen3-8b-eagle3" not in command:
            run(command, newcomer)


@pytest.mark.integration
@pytest.mark.slow
def test_bench_of_the_tutorial_runs_as_it_stands(newcomer, serving, tiny_model):
    """Against servers of ours, at the ports that it names."""
    (line,) = [c for c in commands(TUTORIAL) if c.startswith("draftsmith bench")]
    small = {"vocab_size": len(byte_tokenizer()), "num_hidden_layers": 1}
    model = tiny_model("qwen3", max_position_embeddings=1024, **small)
    model.generation_config.eos_token_id = [*range(0, 256, 2)]  # short answers
    for kind, port in (("ngram", 8000), ("off", 8001)):
        assert f"localhost:{port}" in line
        try:
            serving(drafting_llm(kind, model, max_num_seqs=32), port=port)
        except OSError:
            pytest.skip(f"port {port} is taken")
    assert "advice: " in run(line, newcomer)

"""scripts/cpu_speed.py: the table of `try`, whose seconds are CPU time."""

from __future__ import annotations

import json
import time

from typer.testing import CliRunner

from draftsmith.inference import LLM
from scripts.cpu_speed import app


def test_a_wait_does_not_count(folders, tmp_path, monkeypatch):
    generate = LLM.generate

    def waiting(llm, *arguments, **options):
        if llm.engine.proposer is not None:
            time.sleep(2)
        return generate(llm, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", waiting)
    prompts, saved = tmp_path / "prompts.jsonl", tmp_path / "speed.json"
    prompts.write_text(json.dumps({"prompt": "one two one two"}) + "\n", encoding="utf-8")
    options = {
        "model": folders[0],
        "drafter": folders[1],
        "prompts": prompts,
        "json": saved,
        "max-tokens": 4,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(app, [*words, "--method=ngram"])
    assert done.exit_code == 0, done.output
    results = json.loads(saved.read_text(encoding="utf-8"))
    assert list(results) == ["default", "ngram", folders[1], "versions", "arguments"]
    assert results["ngram"]["timings"]["seconds"] < 1
    assert results[folders[1]]["metrics"]["speedup_vs_autoregressive"]["value"] > 0

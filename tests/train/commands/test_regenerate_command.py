"""`draftsmith regenerate`: ahead of a training, killed and continued, here and at a server."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.inference import LLM
from draftsmith.train.commands.options import parse_part
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.cli import call, refused
from tests.support.forked import PythonProcess
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import save_target


@pytest.fixture
def recipe(tmp_path):
    """A recipe file whose target lies on the disk, and ends its turns now and then."""
    target = save_target(tmp_path / "target", eos_token_id=list(range(0, 4096, 9)))
    path = tmp_path / "x.yaml"
    tree = {
        "name": "x",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(target)},
        "data": {
            "train": [quickstart("train", 30)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "regenerate": {"turns": "all", "max_new_tokens": 12, "batch_size": 4},
        "evaluation": {"max_tokens": 8, "top_k": 20, "temperatures": [0.0, 0.7]},
    }
    path.write_text(yaml_text(tree))
    return path


def stored(folder: Path) -> dict[str, list[int]]:
    """Token ids by key of all whole lines; none is there twice."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    entries = [(entry["key"], entry["token_ids"]) for entry in map(json.loads, lines)]
    assert not [key for key, number in Counter(key for key, _ in entries).items() if number > 1]
    return dict(entries)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "server"])
def test_a_kill_loses_the_responses_in_flight_and_no_other(recipe, serving, tmp_path, where):
    """SIGKILL; the same command asks for nothing that was answered, and writes the same."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    overrides = [f"regenerate.cache_dir={folder}"]
    if where == "server":
        llm = LLM(str(tmp_path / "target"), max_num_seqs=8)
        url = serving(llm, served_model_name=(str(tmp_path / "target"),)) + "/v1"
        overrides.append(f"regenerate.endpoints=[{{url: '{url}', max_concurrency: 2}}]")
    process = PythonProcess("-m", "draftsmith.train.cli", "regenerate", recipe, *overrides)
    while len(stored(folder)) < 12:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = stored(folder)

    code, output = call("regenerate", recipe, *overrides)
    assert code == 0, output
    reused = re.findall(r"(\d+) reused", output)  # to train on, held out
    assert sum(map(int, reused)) == len(kept) and "responses:" in output
    assert call("regenerate", recipe, f"regenerate.cache_dir={whole}")[0] == 0
    assert stored(folder) == stored(whole) and kept.items() <= stored(whole).items()
    record = json.loads((tmp_path / "run" / "regeneration.json").read_text())
    assert str(tmp_path) not in json.dumps(record)  # no address, no folder
    # texts that are held out are written as the report samples, not as those to train on
    sampling = sorted((entry["max_new_tokens"], entry["top_k"]) for entry in record.values())
    assert sampling == [(8, 20), (12, 0)]
    counts = sorted(entry["account"]["requested"] for entry in record.values())
    assert counts[0] == 2 * 6  # the same prompts at both temperatures


def test_parts_are_numbered_from_one(recipe):
    assert (parse_part("1/1"), parse_part("2/4")) == ((0, 1), (1, 4))
    for wrong in ("0/4", "5/4", "2", "a/b"):
        assert f"--part {wrong}" in refused("regenerate", recipe, "--part", wrong)

"""`draftsmith regenerate`: ahead of a training, killed and continued, and found by what comes
after."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from inference import LLM
from tests.forked import Forked
from tests.quickstart_data import source as quickstart
from tests.train.test_cli import TOKENIZER, call, refused
from train.commands.options import parse_part


@pytest.fixture
def recipe(tmp_path, tiny_model):
    """A recipe file whose target lies on the disk, and ends its turns now and then."""
    model = tiny_model("qwen3", vocab_size=4096, max_position_embeddings=512)
    model.generation_config.eos_token_id = list(range(0, 4096, 9))
    model.save_pretrained(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "target" / name).write_bytes((TOKENIZER / name).read_bytes())
    path = tmp_path / "x.yaml"
    source = quickstart("train", 60)
    path.write_text(
        yaml.safe_dump(
            {
                "name": "x",
                "output_dir": str(tmp_path / "run"),
                "target": {"model": str(tmp_path / "target")},
                "data": {
                    "train": [source],
                    "validation": [quickstart("validation", 6)],
                    "max_length": 256,
                },
                "regenerate": {"turns": "all", "max_new_tokens": 12, "batch_size": 8},
                "evaluation": {"max_tokens": 8},
            }
        )
    )
    return path


def lines(folder: Path) -> list[dict]:
    found = [line for path in folder.glob("*.0*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in found if line.endswith("}")]


@pytest.mark.slow
def test_killed_and_continued_it_is_what_this_process_writes(recipe, serving, tmp_path):
    served = LLM(str(tmp_path / "target"), max_num_seqs=8)
    url = serving(served, served_model_name=(str(tmp_path / "target"),)) + "/v1"
    there = [
        f"regenerate.cache_dir={tmp_path / 'there'}",
        f"regenerate.endpoints=[{{url: '{url}', max_concurrency: 2}}]",
    ]
    process = Forked(["-m", "train.cli", "regenerate", recipe, *there])
    while len(lines(tmp_path / "there")) < 15:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {line["key"] for line in lines(tmp_path / "there")}

    code, told = call("regenerate", recipe, *there)
    assert code == 0, told
    found = lines(tmp_path / "there")
    assert len({line["key"] for line in found}) == len(found) > len(before) >= 15
    assert (
        call("regenerate", recipe, f"regenerate.cache_dir={tmp_path / 'here'}")[0] == 0
    )  # no endpoints: in process
    ours = [
        json.loads(line)
        for path in (tmp_path / "here").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {e["key"]: e["token_ids"] for e in found} == {
        e["key"]: e["token_ids"] for e in ours if e
    }
    records = [json.loads(path.read_text()) for path in (tmp_path / "there").glob("*.json")]
    assert len(records) == 2 and all(
        record["target"] == str(tmp_path / "target") for record in records
    )
    account = next(record["account"] for record in records if record["turns"] == "all")
    assert account["reused"] >= 15
    assert account["wanted"] == account["reused"] + account["written"] + sum(
        account["left_out"].values()
    )
    told = json.loads(
        (tmp_path / "run" / "regeneration.json").read_text()
    )  # what an export says of it
    assert url not in json.dumps(told) and str(tmp_path) not in json.dumps(told)


def test_parts_are_numbered_from_one(recipe):
    assert (parse_part("1/1"), parse_part("2/4")) == ((0, 1), (1, 4))
    for wrong in ("0/4", "5/4", "2", "a/b"):
        assert f"--part {wrong}: expected I/N" in refused("regenerate", recipe, "--part", wrong)


@pytest.mark.slow
def test_what_cannot_be_is_refused(recipe, monkeypatch):
    none = "regenerate.endpoints=[{url: 'http://127.0.0.1:9/v1', api_key_env: NO_SUCH_KEY}]"
    assert "the environment variable NO_SUCH_KEY holds no key" in refused(
        "regenerate", recipe, none
    )
    twice = "regenerate.endpoints=['http://a:1/v1', 'http://a:1/v1/']"
    assert "each address may be given once" in refused("regenerate", recipe, twice)
    assert "expected a string matching" in refused(
        "regenerate", recipe, "regenerate.endpoints=['a:1']"
    )
    nothing = ["regenerate.enabled=false", "data.validation=[]"]
    assert "nothing is written" in refused("regenerate", recipe, *nothing)

"""The target that the repository carries is what its card says: small, deep, able, and drafted for
without loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer

from inference import LLM, SamplingParams
from inference.report.schema import load_report
from tests.integration.test_pipeline import trained_lora
from tests.quickstart_data import WORKLOADS, rows
from tests.quickstart_data import source as quickstart
from train.pipeline.run import run

TARGET = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target"


@pytest.fixture(scope="module")
def llm():
    drafting = {"method": "ngram", "num_speculative_tokens": 4}
    return LLM(str(TARGET), dtype="float32", speculative_config=drafting, max_num_seqs=8)


def test_small_deep_narrow_and_bfloat16():
    config = json.loads((TARGET / "config.json").read_text())
    assert (
        config["model_type"] == "qwen3"
        and config["num_hidden_layers"] >= 16
        and config["hidden_size"] <= 256
    )
    assert 4096 <= config["vocab_size"] <= 8192
    assert sum(path.stat().st_size for path in TARGET.iterdir()) < 30e6
    with safe_open(TARGET / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_the_template_marks_what_the_assistant_says(llm):
    for conversation in rows("test", 12):
        out = llm.get_tokenizer().apply_chat_template(
            conversation["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        said = [token for token, mark in zip(out["input_ids"], out["assistant_masks"]) if mark]
        answers = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
        assert llm.get_tokenizer().decode(said) == "".join(
            f"{answer}<|im_end|>" for answer in answers
        )


@pytest.mark.slow
def test_answers_are_right_end_and_are_the_same_with_drafts(llm):
    """Prompts that training has not seen. The card's rates are of more prompts; this is a floor."""
    asked = rows("test", 30, workloads=("math", "json", "table"))
    params = SamplingParams(temperature=0, max_tokens=320)
    chats = [row["messages"][:-1] for row in asked]
    drafted = llm.chat(chats, params, use_tqdm=False)
    plain = llm.chat(chats, params, use_tqdm=False, speculate=False)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.outputs[0].finish_reason == "stop" for o in plain) >= 29
    right = [is_right(row, o.outputs[0].text) for row, o in zip(asked, plain)]
    assert sum(right) >= 26  # 85 %


def is_right(row: dict[str, Any], answer: str) -> bool:
    """The last number, the JSON object, or the last bold part of the answer is the expected one."""
    if row["workload"] == "json":
        body = answer.strip().removeprefix("```json").removesuffix("```")
        return body.strip().startswith("{") and json.loads(body) == row["expected"]
    pattern = r"answer is (-?\d+)" if row["workload"] == "math" else r"\*\*(.+?)\*\*"
    found = re.findall(pattern, answer)
    return bool(found) and found[-1] == str(row["expected"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_adapted_by_a_lora_it_is_drafted_for_by_a_continued_head(tmp_path):
    """A LoRA is trained to end every answer with other words; both are merged, and the text stays
    the target's own."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    chat = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Your order leaves tomorrow. " * 3},
    ]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    trained_lora(TARGET, ids, tmp_path / "lora", steps=5, learning_rate=0.02, gain=0.2)

    content = {
        "name": "adapted",
        "output_dir": str(tmp_path / "base"),
        "target": {"model": str(TARGET), "dtype": "float32"},
        "drafter": {"unroll_steps": 2, "draft_vocab_size": 512},
        "data": {"train": [quickstart("train", 4)], "max_length": 128},
        "regenerate": {"max_new_tokens": 8, "batch_size": 4},
        "training": {"steps": 2, "batch_size": 2, "mixed_precision": "no"},
        "evaluation": {
            "max_tokens": 8,
            "num_speculative_tokens": 2,
            "temperatures": [0.0],
            "prompts_per_workload": 1,
        },
    }
    content["evaluation"] |= {"repeats": 0, "baseline_transformers": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    assert run(tmp_path / "recipe.yaml") == 0
    changes = [
        f"target.adapter={tmp_path / 'lora'}",
        f"drafter.init_from={tmp_path / 'base' / 'export'}",
    ]
    changes += [
        f"output_dir={tmp_path / 'run'}",
        f"evaluation.prompts={json.dumps([quickstart('test', 3)])}",
    ]
    assert run(tmp_path / "recipe.yaml", changes) == 0
    report = load_report(tmp_path / "run" / "acceptance.json")
    assert report.summary["lossless_mismatches"] == 0
    assert report.provenance.target_name == str(tmp_path / "run" / "target")


def test_the_card_has_a_rate_for_every_workload():
    assert set(card_rates()) == set(WORKLOADS)


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name != "chat"])
def test_what_can_be_checked_is_mostly_right(workload):
    assert card_rates()[workload] >= 90


def card_rates() -> dict[str, int]:
    """Workload -> per cent of right answers, as the model card has them."""
    rows = re.findall(
        r"^\| (\w+) \| .* \| (\d+)% \| (\d+)% \|$", (TARGET / "README.md").read_text(), re.MULTILINE
    )
    return {name: int(right) for name, right, _ in rows}

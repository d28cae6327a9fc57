"""The runtime benchmark: every way in one run, and figures that follow from what was counted."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from inference.entrypoints.prompts import Prompt
from inference.evaluation.side_by_side import Measured, SideBySide
from inference.metrics import SpecDecodeCounters
from inference.report.cost_model import speedup_limit
from inference.report.measurement import Costs
from inference.sampling_params import SamplingParams
from scripts.bench_runtime import ROUND, CostTrials, app, limit_of, parse_methods
from speculators.errors import ConfigError
from speculators.export import export_drafter
from speculators.families.eagle import Eagle
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> tuple[str, str]:
    """A tiny target, which is its own draft model too, and a head; one token per byte."""
    root = tmp_path_factory.mktemp("bench")
    options = dict(
        vocab_size=257,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    model = tiny_model("qwen3", **options)
    model.save_pretrained(root / "target")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(root / "target")
    target = FrozenTarget(model)
    head = Eagle(config_for_target(target, "eagle")).attach(target).eval()
    export_drafter(head, root / "head", dtype=torch.float32)
    return str(root / "target"), str(root / "head")


@pytest.mark.slow
def test_everything_in_one_run(folders, tmp_path):
    target, head = folders
    saved = tmp_path / "out.json"
    done = CliRunner().invoke(
        app,
        [
            f"--model={target}",
            f"--method=eagle={head}",
            f"--method=draft_model={target}",
            "--method=ngram",
            "--prompts=en",
            "--prompts=chat",
            "--num-prompts=2",
            "--batch-sizes=1,2",
            "--max-tokens=10",
            "--repeats=2",
            "--cost-trials=1",
            "--num-speculative-tokens=3",
            f"--json={saved}",
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    rows = json.loads(saved.read_text())["results"]
    ours = ["default", "eagle", "draft_model", "ngram"]
    theirs = ["transformers", "transformers, assistant draft_model", "transformers, prompt lookup"]
    for size, names in ((1, [*ours, *theirs]), (2, [*ours, theirs[0]])):
        for workload in ("en", "chat"):
            part = {
                row["method"]: row
                for row in rows
                if (row["batch_size"], row["workload"]) == (size, workload)
            }
            assert sorted(part) == sorted(names)
            assert all(len(row["tokens_per_second"]["repeats"]) == 2 for row in part.values())
            assert all(set(part[name]["round_ms"]) == set(ROUND) for name in ours)
            assert all(
                part[name]["mismatches"] == 0 and part[name]["limit"] > 0 for name in ours[1:]
            )
            assert part["draft_model"]["acceptance_length"] > 3  # it drafts for itself
    assert rows[0]["speedup"] is None


def test_other_names_inferred_methods_and_scaffolds(folders, tmp_path):
    target, _ = folders
    saved = tmp_path / "out.json"
    given = [
        f"--model={target}",
        "--method=ngram_gpu",
        "--method=lookahead",
        f'--method={{"name":"dm","model":"{target}"}}',
        "--prompts=en",
        "--num-prompts=1",
        "--max-tokens=8",
        "--repeats=1",
        "--cost-trials=1",
        f"--json={saved}",
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    names = [row["method"] for row in json.loads(saved.read_text())["results"]]
    assert {
        "ngram_gpu",
        "lookahead",
        "dm",
        "transformers, assistant dm",
        "transformers, prompt lookup",
    } < set(names)


def test_a_scaffold_is_part_of_what_is_verified(folders):
    """Lookahead's window is in every forward, and so in the limit."""
    runtimes = SideBySide(folders[0], {"lookahead": {"method": "lookahead"}}, max_num_seqs=1)
    prompt = [Prompt(None, list(range(3, 30)))]
    measured = runtimes.run(prompt, SamplingParams(temperature=0, max_tokens=12), 1)
    costs = CostTrials(runtimes, {"lookahead": {"method": "lookahead"}}, 1, 1)
    costs.measure(measured)
    assert (
        costs.parts["lookahead"].k
        > runtimes.llms["lookahead"].engine.proposer.num_scaffold_tokens
        > 15
    )


def test_a_file_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path):
    done = CliRunner().invoke(app, ["--model=nowhere", "--method=ngram", f"--json={tmp_path}"])
    assert isinstance(done.exception, ConfigError) and "--json" in str(done.exception)


@pytest.mark.slow
def test_compiled_beside_eager(folders, traced, tmp_path):
    target, _ = folders
    saved = tmp_path / "out.json"
    given = [
        f"--model={target}",
        "--method=ngram",
        "--prompts=en",
        "--num-prompts=1",
        "--max-tokens=6",
        "--repeats=1",
        "--cost-trials=1",
        "--num-speculative-tokens=2",
        "--no-transformers",
        "--compile",
        f"--json={saved}",
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    part = {row["method"]: row for row in json.loads(saved.read_text())["results"]}
    assert list(part) == ["default", "ngram", "default, compiled", "ngram, compiled"]
    assert part["default, compiled"]["mismatches"] == part["ngram, compiled"]["mismatches"] == 0
    assert part["default, compiled"]["speedup"] is not None


def test_methods_are_read_from_names_folders_and_json():
    named = parse_methods(
        ["eagle3=runs/x", "ngram", '{"name": "deep", "model": "m", "num_speculative_tokens": 7}'], 4
    )
    assert named == {
        "eagle3": {"method": "eagle3", "model": "runs/x", "num_speculative_tokens": 4},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "deep": {"model": "m", "num_speculative_tokens": 7},
    }
    free = parse_methods(["ngram", "suffix", "lookahead", '{"name": 5, "method": "suffix"}'], None)
    assert (
        free["ngram"]["num_speculative_tokens"] == 4
    )  # and of those whose options say it nothing is said
    assert all("num_speculative_tokens" not in free[name] for name in ("suffix", "lookahead", "5"))
    for given, message in ((["ngram", "ngram"], "given twice"), (['{"a"'], "not JSON")):
        with pytest.raises(ConfigError, match=message):
            parse_methods(given, 4)


@pytest.mark.parametrize("wrong", ["--prompts=poems", "--batch-sizes=1,x", "--batch-sizes=0"])
def test_what_cannot_be_measured_is_said_before_anything_is_loaded(wrong):
    done = CliRunner().invoke(app, ["--model=nowhere", "--method=ngram", wrong])
    assert isinstance(done.exception, ConfigError) and wrong.replace("=", " ") in str(
        done.exception
    )


def test_rounds_without_a_draft_cost_and_commit_one_token():
    """With a draft in every round it is the cost model as it stands; with none nothing is
    gained."""
    costs = Costs(target_step_ms=2.0, verify_ms=3.0, draft_ms=0.5)
    always = Measured(
        counters=SpecDecodeCounters(10, 40, 20, [10, 10, 0, 0]), rounds=10, row_rounds=10
    )
    assert limit_of(always, costs) == speedup_limit(
        3.0, step_cost=2.0, verify_cost=3.0, draft_cost=0.5
    )
    never = Measured(counters=SpecDecodeCounters(), rounds=10, row_rounds=10)
    assert limit_of(never, costs) == 2.0 / 2.5

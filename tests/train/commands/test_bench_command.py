"""`draftsmith bench`: its flags, what it prints and saves, and servers that it starts itself."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inference.bench.datasets import load_questions
from inference.bench.options import read_options
from inference.bench.servers import started
from speculators.errors import ConfigError, DraftsmithError
from tests.quickstart_data import DATA
from train.cli import app

CHATS = f"--dataset-name custom --dataset-path {DATA / 'test.jsonl.gz'} --disable-shuffle"
ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "recipes" / "quickstart" / "target"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    tiny_model(
        "qwen3", vocab_size=4096, max_position_embeddings=512, eos_token_id=2
    ).save_pretrained(folder)
    return folder


def read(line: str):
    return read_options(line.split())


def test_flags_are_those_of_vllm():
    found = read(
        "--backend openai-chat --base_url http://a:1/v1 --model m --dataset-name mt_bench"
        " --dataset-path q.jsonl --num-prompts 7 --request-rate 2.5"
        " --max-concurrency 4 --seed 3 --ignore-eos --temperature 0 --percentile-metrics ttft,tpot"
        " --metric-percentiles 25,99.9 --output-len 9"
    )
    assert (found.url, found.route, found.model) == ("http://a:1", "/v1/chat/completions", "m")
    assert (found.request_rate, found.max_concurrency, found.ignores_eos) == (2.5, 4, True)
    assert (found.num_prompts, found.seed, found.output_len) == (7, 3, 9)
    assert (found.percentile_metrics, found.metric_percentiles) == (("ttft", "tpot"), (25.0, 99.9))
    assert found.body == {"temperature": 0.0} and found.num_warmups is None
    random = read(
        "--dataset-name random --random-input-len 5 --random-output-len 6 --host ::1 --port 9"
    )
    assert (random.random_input_len, random.random_output_len, random.ignores_eos) == (5, 6, True)
    assert random.url == "http://[::1]:9" and random.request_rate == float("inf")
    assert (
        read("--dataset-name custom --dataset-path f --custom-output-len -1").custom_output_len
        == -1
    )
    compared = read(
        "--dataset-name random --compare -sc {} --model m --concurrencies 1,4 --extra-body {}"
    )
    assert (compared.speculative_config, compared.concurrencies, compared.together) == (
        {},
        (1, 4),
        False,
    )


@pytest.mark.parametrize(
    "line, named",
    [
        ("", "--dataset-name"),
        ("--dataset-name nothing", "nothing"),
        ("--dataset-name random --num-prompts 0", "--num-prompts 0: .*greater than 0"),
        ("--dataset-name random --request-rate 0", "greater than 0"),
        ("--dataset-name random --no-such-flag 1", "no-such-flag"),
        ("--dataset-name random --percentile-metrics ttft,speed", "speed"),
        ("--dataset-name random --metric-percentiles 101", "less than or equal to 100"),
        ("--dataset-name random --endpoint /v1/chat/completions", "--endpoint"),
        ("--dataset-name random --baseline-url http://a", "--compare"),
        ("--dataset-name random --compare", "--baseline-url"),
        ("--dataset-name random --compare -sc {}", "--model"),
        (
            "--dataset-name random --compare --baseline-url http://a --max-concurrency 2",
            "--concurrencies",
        ),
        ("--dataset-name random --compare --baseline-url http://a --serve-args x", "--serve-args"),
        ("--dataset-name demo", "demo"),
        ("--dataset-name custom", "needs --dataset-path"),
        ("--dataset-name random --dataset-path a", "takes no --dataset-path"),
        ("--dataset-name random --extra-body [1]", "--extra-body"),
        ("--dataset-name random --extra-body {", "--extra-body"),
    ],
)
def test_wrong_flags_are_named(line, named):
    with pytest.raises(ConfigError, match=named):
        read(line)


def test_conversations_are_asked_up_to_their_last_answer():
    asked = read(f"{CHATS} --num-prompts 6 --seed 1")
    questions = load_questions(asked, None)
    lines = gzip.decompress((DATA / "test.jsonl.gz").read_bytes()).splitlines()
    rows = [json.loads(line)["messages"] for line in lines]
    assert [list(question.messages) for question in questions] == [
        messages[:-1] for messages in rows[:6]
    ]
    mixed = [asked.model_copy(update={"disable_shuffle": False, "seed": seed}) for seed in (1, 2)]
    assert load_questions(mixed[0], None) != load_questions(mixed[1], None)


def test_a_torn_archive_is_named(tmp_path):
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes((DATA / "test.jsonl.gz").read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"torn.jsonl.gz: could not be read"):
        load_questions(read(f"--dataset-name custom --dataset-path {torn}"), None)


def test_no_server_is_said_at_once():
    asked = ["bench", *CHATS.split(), "--port", "1", "--num-prompts", "3"]
    for model in ([], ["--model", str(TOKENIZER), "--request-rate", "0.001"]):
        result = CliRunner().invoke(app, [*asked, *model])
        assert result.exit_code == 2
        assert "is the server running" in result.output.replace("\n", " ")


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(interpreter, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter)
    log = tmp_path / "logs" / "server.log"
    with (
        pytest.raises(DraftsmithError, match="no such") as caught,
        started("no such", None, [], log, 60),
    ):
        pass
    assert "status 2" in str(caught.value)
    with pytest.raises(ConfigError, match="--port"), started("m", None, ["--port", "5"], log, 60):
        pass


@pytest.mark.slow
def test_one_server_then_off_and_on(target, interpreter, tmp_path, monkeypatch):
    """Through the command: two servers of a folder, started and stopped; then one measurement,
    saved."""
    monkeypatch.setattr(sys, "executable", interpreter)
    flags = [*CHATS.split(), "--num-prompts", "4", "--output-len", "40", "--disable-tqdm"]
    compare = [
        "--compare",
        "--model",
        str(target),
        "--speculative-config",
        NGRAM,
        "--concurrencies",
        "1,2",
    ]
    run = CliRunner().invoke(
        app,
        ["bench", *compare, *flags, "--temperature", "0", "--result-dir", str(tmp_path)],
        catch_exceptions=False,
    )
    assert run.exit_code == 0, run.output
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [level["identical_outputs"] for level in found["levels"]] == [4, 4]
    assert all("spec_decode_num_drafts" in level["on"] for level in found["levels"])
    with started(
        str(target), json.loads(NGRAM), ["--served-model-name", "tiny"], tmp_path / "log", 120
    ) as url:
        save = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "one.json"]
        one = ["--base-url", url, "--tokenizer", str(target), *flags, *save]
        run = CliRunner().invoke(
            app, ["bench", *one, "--request-rate", "50"], catch_exceptions=False
        )
        both = [
            "--compare",
            "--baseline-url",
            url + "/v1",
            "--concurrencies",
            "2",
            "--result-filename",
            "both.json",
        ]
        again = CliRunner().invoke(app, ["bench", *one, *both], catch_exceptions=False)
    assert (run.exit_code, again.exit_code) == (0, 0), run.output + again.output
    assert len(json.loads((tmp_path / "both.json").read_text())["levels"]) == 1
    result = json.loads((tmp_path / "one.json").read_text())
    assert result["completed"] == 4 and result["request_rate"] == 50 and "ttfts" not in result
    assert {
        "p50_ttft_ms",
        "p90_tpot_ms",
        "p99_itl_ms",
        "mean_e2el_ms",
        "total_token_throughput",
    } <= set(result)
    assert "TTFT" in run.output and "one.json" in run.output.replace("\n", "")


def test_help_needs_no_torch():
    code = (
        "import sys; from inference.bench.options import read_options; assert 'torch' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

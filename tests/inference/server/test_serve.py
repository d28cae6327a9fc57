"""The command lines of guides, read as vLLM reads them; and the one that starts vLLM itself."""

from __future__ import annotations

import json
import shlex
import socket
import sys

import pytest
import torch
from typer.testing import CliRunner

from inference.server.command import checked_defaults, given_defaults
from inference.server.options import read_flags
from inference.server.real_vllm import vllm_command, wants_vllm
from speculators.errors import ConfigError
from speculators.export import export_drafter
from train.cli import app

GUIDE = (
    "--host 0.0.0.0 --port 8000 --model facebook/opt-6.7b --seed 42 -tp 1 --gpu_memory_utilization"
    " 0.8 "
    """--speculative_config '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}'"""
)
OLDER = (
    "--model=target --dtype float16 --tensor-parallel-size 1 --trust-remote-code --device cpu"
    " --block-size 64 --speculative-model [ngram] --use-v2-block-manager --num-speculative-tokens 5"
    " --ngram-prompt-lookup-max 3"
)


def test_the_guide_s_command():
    flags, others = read_flags(shlex.split(GUIDE))
    assert (flags.model, flags.port, flags.seed, flags.tensor_parallel_size) == (
        "facebook/opt-6.7b",
        8000,
        42,
        1,
    )
    assert flags.speculative_config == {"model": "facebook/opt-125m", "num_speculative_tokens": 5}
    assert others == {"gpu_memory_utilization": 0.8}


def test_flags_of_older_versions():
    flags, others = read_flags(shlex.split(OLDER))
    assert (flags.model, flags.dtype, flags.device, flags.trust_remote_code) == (
        "target",
        "float16",
        "cpu",
        True,
    )
    assert others == {
        "block_size": 64,
        "speculative_model": "[ngram]",
        "use_v2_block_manager": True,
        "num_speculative_tokens": 5,
        "ngram_prompt_lookup_max": 3,
    }


def test_the_model_may_come_first():
    flags, others = read_flags(
        [
            "target",
            "--no-enable-prefix-caching",
            "--no-async-scheduling",
            "--served-model-name",
            "a",
            "b",
        ]
    )
    assert flags.model == "target" and others == {
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    assert flags.served_model_name == ("a", "b")
    flags, others = read_flags(["--port", "1", "--block-size", "64", "target"])
    assert flags.model == "target" and others == {"block_size": 64}


@pytest.mark.parametrize(
    "line, named",
    [
        ("", "--model is missing"),
        ("a --model b", "two models"),
        ("a --port x", "--port"),
        ("a --speculative-config 5", "JSON object"),
        ("a -q 5", "'-q'"),
        ("--modle x", "--modle"),
    ],
)
def test_wrong_flags(line, named):
    with pytest.raises(ConfigError, match=named):
        read_flags(shlex.split(line))


@pytest.mark.parametrize(
    "line, named",
    [
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--port 99999", "--port"),
        ("--chat-template nowhere.jinja", "nowhere.jinja"),
    ],
)
def test_wrong_values(line, named):
    with pytest.raises(ConfigError, match=named):
        read_flags(["a", *shlex.split(line)])


def test_keys_and_templates(monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    flags, _ = read_flags(
        ["a", "--api-key", "x", "y", "--chat-template", str(tmp_path / "t.jinja")]
    )
    assert (flags.api_key, flags.chat_template) == (("x", "y"), "{{ messages }}")
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "z")
    flags, _ = read_flags(["a", "--chat-template", "{{ 1 }}"])
    assert (flags.api_key, flags.chat_template) == (("z",), "{{ 1 }}")


def test_an_option_that_would_change_something_is_an_error(tmp_path):
    found = CliRunner().invoke(app, ["serve", "nowhere", "--quantization", "fp8"])
    assert found.exit_code == 2 and "quantization" in found.stderr
    found = CliRunner().invoke(app, ["serve", "nowhere", "--no-such-flag", "1"])
    assert found.exit_code == 2 and "no_such_flag" in found.stderr
    assert "--speculative-config" in CliRunner().invoke(app, ["serve", "--help"]).stdout


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--override-generation-config", '{"temperature": -4}'], "temperature"),
        (["--override-generation-config", '{"top_k": "five"}'], "top_k"),
        (["--override-generation-config", '{"temprature": 0.2}'], "temprature"),
        (["--generation-config", "/nowhere"], "--generation-config /nowhere"),
        (["--port", "TAKEN"], "--port"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(flags, named):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = [port if word == "TAKEN" else word for word in flags]
        found = CliRunner().invoke(app, ["serve", "nowhere", "--host", "127.0.0.1", *flags])
    assert found.exit_code == 2 and named in found.stderr and "Traceback" not in found.output


def test_defaults_of_the_model_and_of_flags():
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert checked_defaults(config, "it") == defaults
    flags, _ = read_flags(["a", "--override-generation-config", '{"top_p": 0.5}'])
    assert given_defaults(flags) == {"top_p": 0.5}
    with pytest.raises(ConfigError, match="it: .*top_k"):
        checked_defaults({"top_k": -7}, "it")


class TestVLLM:
    """--engine vllm: the same flags to real vLLM, the drafter's method named."""

    def command(self, line: str) -> tuple[list[str], dict]:
        arguments = ["--engine", "vllm", "--vllm-python", sys.executable, *shlex.split(line)]
        assert wants_vllm(arguments)
        command = vllm_command(arguments)
        assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        at = command.index("--speculative-config") if "--speculative-config" in command else None
        return command[3:], {} if at is None else json.loads(command[at + 1])

    def test_everything_else_is_handed_on(self):
        command, drafting = self.command(
            "target -tp 4 --gpu_memory_utilization=0.8 --nnodes 2 --api-key k"
        )
        assert command[:2] == ["--model", "target"] and drafting == {}
        assert command[2:] == [
            "-tp",
            "4",
            "--gpu-memory-utilization=0.8",
            "--nnodes",
            "2",
            "--api-key",
            "k",
        ]

    def test_the_method_is_read_from_the_drafter(self, tiny_model, tiny_eagle3, tmp_path):
        model = tiny_model("qwen3")
        model.save_pretrained(tmp_path / "target")
        export_drafter(tiny_eagle3(model, (1, 2)), tmp_path / "head", dtype=torch.float32)
        given = json.dumps(
            {
                "model": str(tmp_path / "head"),
                "num_speculative_tokens": 3,
                "draft_tensor_parallel_size": 1,
            }
        )
        _, drafting = self.command(f"{tmp_path / 'target'} --speculative_config '{given}'")
        assert drafting == json.loads(given) | {"method": "eagle3"}

    def test_words_of_ours_become_theirs(self):
        given = {
            "method": "dflash2",
            "model": "x",
            "num_speculative_tokens": 2,
            "rejection_sample_method": "token",
        }
        _, drafting = self.command(f"target --speculative-config '{json.dumps(given)}'")
        assert drafting == given | {
            "method": "dflash",
            "rejection_sample_method": "standard",
        }
        with pytest.raises(ConfigError, match="mlp"):
            self.command(f"target -sc '{json.dumps(given | {'method': 'mlp'})}'")
        _, drafting = self.command(OLDER)
        assert drafting == {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}

    @pytest.mark.parametrize(
        "line, named",
        [
            ("", "--model"),
            ("""target -sc '{"method": "lookahead"}'""", "lookahead"),
            ("""target -sc '{"num_speculative_tokens": 3}'""", "method"),
            ("""target -sc '{"method": "ngram"}' --speculative-model x""", "older"),
        ],
    )
    def test_what_it_cannot_do(self, line, named):
        with pytest.raises(ConfigError, match=named):
            self.command(line)

    def test_where_vllm_is(self, monkeypatch):
        monkeypatch.delenv("DRAFTSMITH_VLLM_PYTHON", raising=False)
        with pytest.raises(ConfigError, match="DRAFTSMITH_VLLM_PYTHON"):
            vllm_command(["target"])
        monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", "/nowhere/python")
        with pytest.raises(ConfigError, match="/nowhere/python"):
            vllm_command(["target"])


def test_compiling_is_asked_for_as_in_vllm():
    flags, others = read_flags(
        ["a", "--no-enforce-eager", "--compilation-config", "3", "--warm-up-limit", "60"]
    )
    assert flags.enforce_eager is False and flags.compilation_config == 3 and not others
    assert flags.warm_up_limit_s == 60
    assert (
        read_flags(["a", "--enforce-eager"])[0].enforce_eager is True
        and read_flags(["a"])[0].enforce_eager is None
    )
    with pytest.raises(ConfigError, match="compilation-config .*JSON object"):
        read_flags(["a", "--compilation-config", "[]"])

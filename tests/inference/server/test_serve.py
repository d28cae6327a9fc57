"""The command lines of guides, read as vLLM reads them; and the one that starts vLLM itself."""

from __future__ import annotations

import json
import shlex
import socket

import pytest
import torch
import typer
from typer.testing import CliRunner

from draftsmith.inference.flags import given_values
from draftsmith.inference.server.command import sampling_defaults
from draftsmith.inference.server.options import ServeFlags, read_flags, undeclared, with_model
from draftsmith.inference.server.real_vllm import speculative_config, take_older, vllm_command
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.train.cli import app

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
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}


def words(line: str) -> tuple[dict, list[str]]:
    """The values of the flags, with the model, and what is no flag of `serve`."""
    command = typer.main.get_command(app).commands["serve"]
    context = command.make_context("serve", shlex.split(line))
    return with_model(given_values(context.params), context.args)


def read(line: str) -> tuple[ServeFlags, dict]:
    given, rest = words(line)
    return read_flags(given), undeclared(rest)


def test_the_guide_s_command():
    flags, others = read(GUIDE)
    assert (flags.model, flags.port, flags.seed) == ("facebook/opt-6.7b", 8000, 42)
    assert flags.speculative_config == {"model": "facebook/opt-125m", "num_speculative_tokens": 5}
    assert flags.tensor_parallel_size == 1 and others == {"gpu_memory_utilization": 0.8}


def test_flags_of_older_versions(caplog):
    given, rest = words(OLDER)
    flags, (older, rest) = read_flags(given), take_older(rest)
    assert (flags.model, flags.dtype, flags.device) == ("target", "float16", "cpu")
    assert flags.trust_remote_code and undeclared(rest) == {
        "block_size": 64,
        "use_v2_block_manager": True,
    }
    assert speculative_config(flags, older) == NGRAM
    assert "--ngram-prompt-lookup-max" in caplog.text
    assert f"--speculative-config '{json.dumps(NGRAM)}'" in caplog.text
    today, _ = read(f"target -sc '{json.dumps(NGRAM)}'")
    assert speculative_config(today, {}) == NGRAM
    with pytest.raises(ConfigError, match="--speculative-config"):
        speculative_config(today, older)


def test_the_model_may_come_first():
    flags, others = read(
        "target --no-enable-prefix-caching --no-async-scheduling --served-model-name a b"
    )
    assert (flags.model, flags.served_model_name) == ("target", ("a", "b"))
    assert others == {"enable_prefix_caching": False, "async_scheduling": False}
    flags, others = read("--port 1 --block-size 64 target")
    assert (flags.model, flags.served_model_name) == ("target", ("target",))
    assert others == {"block_size": 64}


@pytest.mark.parametrize(
    "line, named",
    [
        ("", "--model"),
        ("a --model b", "--model b"),
        ("a --port x", "--port x"),
        ("a --port 99999", "--port 99999"),
        ("a --speculative-config 5", "--speculative-config 5"),
        ("a -q 5", "'-q'"),
        ("--modle x", "--modle"),
        ("a --max_num_seqs 0", "--max-num-seqs 0"),
        ("a --chat-template nowhere.jinja", "nowhere.jinja"),
        ("a --compilation-config []", "--compilation-config"),
    ],
)
def test_wrong_flags_are_named(line, named):
    with pytest.raises(ConfigError, match=named):
        read(line)


def test_keys_and_templates(monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    flags, _ = read(f"a --api-key x y --chat-template {tmp_path / 't.jinja'}")
    assert (flags.api_key, flags.chat_template) == (("x", "y"), "{{ messages }}")
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "z")
    flags, _ = read("a --chat-template '{{ 1 }}' --no-enforce-eager --compilation-config 3")
    assert (flags.api_key, flags.chat_template) == (("z",), "{{ 1 }}")
    assert (flags.enforce_eager, flags.compilation_config) == (False, 3)
    assert read("a --enforce-eager")[0].enforce_eager and read("a")[0].enforce_eager is None


@pytest.mark.parametrize(
    "line, named",
    [
        ("--quantization fp8", "quantization"),
        ("--no-such-flag 1", "no_such_flag"),
        ("--generation-config /nowhere", "--generation-config /nowhere"),
        ("--port TAKEN", "--port"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(line, named):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = line.replace("TAKEN", str(taken.getsockname()[1]))
        found = CliRunner().invoke(app, ["serve", "nowhere", "--port", "0", *shlex.split(line)])
    assert found.exit_code == 2 and named in found.stderr and "Traceback" not in found.output


def test_help_fits_80_columns():
    found = CliRunner().invoke(app, ["serve", "-h"], env={"COLUMNS": "80"}).output
    assert max(map(len, found.splitlines())) <= 80 and "{" not in found
    first, second, third = (
        found.index(f"\n{title}:") for title in ("Serve", "Target and drafter", "Requests")
    )
    assert found.index("--model TEXT") < second < found.index("--speculative-config") < third
    assert first < second and third < found.index("--api-key")


def test_no_usage_has_braces():
    for name, command in typer.main.get_command(app).commands.items():
        usage = command.get_usage(typer.Context(command, info_name=name))
        assert not {"{", "[["} & {*usage, *(usage[i : i + 2] for i in range(len(usage)))}, usage


def test_defaults_of_the_model():
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert sampling_defaults(config) == defaults
    with pytest.raises(ConfigError, match="generation_config.json: .*top_k"):
        sampling_defaults({"top_k": -7})


class TestVLLM:
    """--engine vllm: the same flags to real vLLM, the drafter's method named."""

    @pytest.fixture(autouse=True)
    def python(self, monkeypatch):
        monkeypatch.setattr(
            "draftsmith.inference.server.real_vllm.vllm_python", lambda given: given
        )

    def command(self, line: str) -> tuple[list[str], dict]:
        given, rest = words(f"--engine vllm --vllm-python py {line}")
        command = vllm_command(given, rest)
        assert command[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
        at = command.index("--speculative-config") if "--speculative-config" in command else None
        return command[3:], {} if at is None else json.loads(command[at + 1])

    def test_everything_else_is_handed_on(self):
        command, drafting = self.command(
            "target -tp 4 --gpu_memory_utilization=0.8 --nnodes 2 --api-key k l --enforce-eager"
        )
        assert command[:2] == ["--model", "target"] and drafting == {}
        handed = "--enforce-eager --tensor-parallel-size 4 --api-key k l"
        assert sorted(command[2:]) == sorted(
            f"{handed} --gpu-memory-utilization=0.8 --nnodes 2".split()
        )
        assert command.index("l") == command.index("k") + 1 == command.index("--api-key") + 2

    def test_the_method_is_read_from_the_drafter(self, tiny_model, tiny_eagle3, tmp_path):
        model = tiny_model("qwen3")
        model.save_pretrained(tmp_path / "target")
        export_drafter(tiny_eagle3(model, (1, 2)), tmp_path / "head", dtype=torch.float32)
        given = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
        line = f"{tmp_path / 'target'} --speculative_config '{json.dumps(given)}'"
        assert self.command(line)[1] == given | {"method": "eagle3"}

    def test_words_of_ours_become_theirs(self):
        given = {"method": "dflash2", "model": "x", "num_speculative_tokens": 2}
        given["rejection_sample_method"] = "token"
        _, drafting = self.command(f"target --speculative-config '{json.dumps(given)}'")
        assert drafting == given | {"method": "dflash", "rejection_sample_method": "standard"}
        assert self.command(OLDER)[1] == NGRAM

    @pytest.mark.parametrize(
        "line, named",
        [
            ("""target -sc '{"method": "lookahead"}'""", "lookahead"),
            (
                """target -sc '{"method": "mlp", "model": "x", "num_speculative_tokens": 2}'""",
                "mlp",
            ),
            ("""target -sc '{"num_speculative_tokens": 3}'""", "method"),
            ("""target -sc '{"method": "ngram"}' --speculative-model x""", "--speculative-model"),
        ],
    )
    def test_what_it_cannot_do(self, line, named):
        with pytest.raises(ConfigError, match=named):
            self.command(line)

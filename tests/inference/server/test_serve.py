"""The command lines of guides, read as vLLM reads them; and the one that starts vLLM itself."""

from __future__ import annotations

import json
import logging
import shlex
import signal
import socket

import pytest
import typer
from transformers import GenerationConfig
from typer.testing import CliRunner

from draftsmith.inference.flags import passed_values
from draftsmith.inference.server import serve_command
from draftsmith.inference.server.protocol import CompletionRequest
from draftsmith.inference.server.serve_command import DEFAULTS, bind, log_address
from draftsmith.inference.server.serve_options import ServeFlags, read_flags, undeclared, with_model
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.cli import app
from tests.support.errors import raises_at
from tests.support.targets import save_target

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
GUIDE = (
    "--host 0.0.0.0 --port 8000 --model facebook/opt-6.7b --seed 42 -tp 1 --gpu_memory_utilization"
    f" 0.8 --speculative_config '{json.dumps(NGRAM)}'"
)


def words(line: str) -> tuple[dict, list[str]]:
    """The values of the flags, with the model, and what is no flag of `serve`."""
    command = typer.main.get_command(app).commands["serve"]
    context = command.make_context("serve", shlex.split(line))
    return with_model(passed_values(context.params), context.args)


def read(line: str) -> tuple[ServeFlags, dict]:
    flags, rest = words(line)
    return read_flags(flags), undeclared(rest)


def test_flags_of_a_guide_are_read():
    flags, others = read(GUIDE)
    assert (flags.model, flags.port, flags.seed) == ("facebook/opt-6.7b", 8000, 42)
    assert flags.speculative_config == NGRAM and flags.tensor_parallel_size == 1
    assert others == {"gpu_memory_utilization": 0.8}


def test_model_may_stand_alone_and_flags_may_be_given_several_times():
    names = "--served-model-name a --served_model_name b"
    flags, others = read(f"target --no-enable-prefix-caching {names} --api-key x")
    assert (flags.model, flags.served_model_name) == ("target", ("a", "b"))
    assert others == {"enable_prefix_caching": False} and flags.api_key == ("x",)
    flags, others = read("--port 1 --block-size 64 target --no-enforce-eager")
    assert (flags.model, flags.served_model_name) == ("target", ("target",))
    assert others == {"block_size": 64} and flags.enforce_eager is False


@pytest.mark.parametrize(
    "line, where",
    [
        ("", "--model"),
        ("a --port x", "--port"),
        ("a --speculative-config 5", "--speculative-config"),
        ("a -q 5", "-q"),
        ("a --chat-template nowhere.jinja", "--chat-template"),
        ("a --api-key schlüssel", "--api-key"),
        ("a --api-key good --api-key ''", "--api-key"),
        ("a --api-key ' x'", "--api-key"),
        ("a --drafters-dir .", "--drafters-dir"),
        ("a --drafters-dir nowhere --api-key x", "--drafters-dir"),
        ("a --max-num-sequences 4", "--max-num-sequences"),
    ],
)
def test_wrong_flag_is_named(line, where):
    with raises_at(ConfigError, f"serve {where}"):
        read(line)


def test_templates_are_files_or_texts_and_keys_may_come_from_the_environment(monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert read(f"a --chat-template {tmp_path / 't.jinja'}")[0].chat_template == "{{ messages }}"
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "z")
    flags, _ = read("a --chat-template '{{ 1 }}'")
    assert (flags.api_key, flags.chat_template) == (("z",), "{{ 1 }}")


@pytest.mark.parametrize("flag", ["--quantization fp8", "--no-such-flag 1", "--port TAKEN"])
def test_what_cannot_be_served_is_said_before_anything_is_loaded(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = ["serve", "nowhere", "--host", "127.0.0.1", "--port", "0", *flag.split()]
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, [word.replace("TAKEN", port) for word in line])
    name = flag.split()[0].removeprefix("--").replace("-", "_")
    stderr = result.stderr.replace("-", "_")
    assert result.exit_code == 2 and name in stderr and "Traceback" not in result.output


def test_bind_nobody_else_gets_the_port_while_the_model_loads():
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        address = f"serve --host 127.0.0.1 --port {port}"
        message = f"^{address}: Address already in use; give another address or port$"
        with pytest.raises(ConfigError, match=message):
            bind("127.0.0.1", port)


def test_bind_connections_send_a_piece_without_waiting_for_confirmation_of_the_last():
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "host, keyed, level",
    [(None, False, "INFO"), ("0.0.0.0", True, "INFO"), ("0.0.0.0", False, "WARNING")],
)
def test_announce_an_open_server_is_a_warning(host, keyed, level, caplog):
    """A server is for its own machine unless a flag says otherwise."""
    caplog.set_level(logging.INFO)
    options = read("a" if host is None else f"a --host {host}")[0]
    with bind(options.host, 0) as listening:
        log_address(listening, keyed)
        port = listening.getsockname()[1]
    (record,) = caplog.records
    assert record.levelname == level and f":{port}" in record.message


OF_THE_MODEL = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 9}


@pytest.fixture
def served(monkeypatch, tmp_path):
    """`served(flags)`: the options that the routes get for a target with OF_THE_MODEL in its
    generation_config.json."""
    GenerationConfig(do_sample=True, **OF_THE_MODEL).save_pretrained(save_target(tmp_path))
    options: list[ServeFlags] = []
    # what serves until a signal
    monkeypatch.setattr(serve_command, "serve_app", lambda llm, flags, *_: options.append(flags))
    interrupt = signal.getsignal(signal.SIGINT)

    def run(flags: str) -> ServeFlags:
        line = ["serve", str(tmp_path), "--port", "0", *flags.split()]
        assert CliRunner().invoke(app, line).exit_code == 0
        return options.pop()

    yield run
    signal.signal(signal.SIGINT, interrupt)


def params_of(options: ServeFlags, **fields) -> dict:
    body = json.dumps({"prompt": "x", **fields}).encode()
    _, params = CompletionRequest.read(body, options)
    return {name: getattr(params, DEFAULTS[name]) for name in OF_THE_MODEL}


def test_run_requests_get_what_they_leave_out_from_the_generation_config(served):
    options = served("")
    assert params_of(options) == OF_THE_MODEL
    asked = params_of(options, temperature=0, max_tokens=3)
    assert asked == {**OF_THE_MODEL, "temperature": 0, "max_new_tokens": 3}


def test_run_generation_config_vllm_leaves_the_model_s_parameters_out(served):
    usual = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_new_tokens": 16}
    assert params_of(served("--generation-config vllm")) == usual

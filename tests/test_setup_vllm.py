"""The environment of real vLLM is set up by whichever installer can."""

from __future__ import annotations

import pytest

from scripts import setup_vllm
from scripts.setup_vllm import Environment, SetupError


@pytest.fixture
def commands(tmp_path, monkeypatch) -> list[list[str]]:
    """What would be run, on a machine whose `uv` finds no package."""
    run: list[list[str]] = []

    def record(self, step, command):
        run.append([str(part) for part in command])
        if command[0] == "uv":
            raise SetupError(f"could not {step}: exit status 2")
        return "vLLM\n"

    monkeypatch.setattr(Environment, "_run", record)
    monkeypatch.setattr(Environment, "_start_anew", lambda self: self.folder.mkdir(exist_ok=True))
    monkeypatch.setattr(
        setup_vllm.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None
    )
    return run


def test_pip_follows_a_uv_that_fails(commands, tmp_path, capsys):
    assert setup_vllm.main([str(tmp_path / "venv"), "--no-suffix"]) == 0
    assert commands[0][0] == "uv" and any(
        "pip" in command for command in commands if command[0] != "uv"
    )
    assert "uv could not; starting again with pip" in capsys.readouterr().err


def test_an_installer_that_was_asked_for_is_the_only_one(commands, tmp_path, capsys):
    assert setup_vllm.main([str(tmp_path / "venv"), "--no-suffix", "--installer", "uv"]) == 1
    assert (
        all(command[0] == "uv" for command in commands)
        and "starting again" not in capsys.readouterr().err
    )

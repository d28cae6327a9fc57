"""scripts/setup_vllm.py: an environment is filled once, and only where nothing else is."""

from __future__ import annotations

from scripts import setup_vllm
from scripts.setup_vllm import VllmEnvironment


def test_environment_without_compiler_leaves_suffix_out_and_is_filled_once(
    tmp_path, monkeypatch, capsys
):
    commands: list[str] = []

    def record(self, step, command):
        commands.append(" ".join(map(str, command)))
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.touch()
        return "versions\n"

    monkeypatch.setattr(VllmEnvironment, "_run", record)
    monkeypatch.setattr(setup_vllm.shutil, "which", lambda name: None)
    assert setup_vllm.main([str(tmp_path / "venv")]) == 0
    assert any(setup_vllm.VLLM in command for command in commands)
    assert not any(setup_vllm.SUFFIX in command for command in commands)
    assert "no C++ compiler" in capsys.readouterr().out
    count = len(commands)
    assert setup_vllm.main([str(tmp_path / "venv")]) == 0
    assert len(commands) == count

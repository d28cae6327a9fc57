"""The `draftsmith` command in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from draftsmith.train.cli import app


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def refused(*arguments: object) -> str:
    """The message of a command that a user can mend: exit code 2, one paragraph, no traceback."""
    code, output = call(*arguments)
    assert code == 2, output
    assert "Traceback" not in output
    assert "\n\n" not in output.strip()
    return output

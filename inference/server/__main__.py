"""`python -m draftsmith.inference.server` serves, as `draftsmith serve` does."""

from draftsmith.inference.console import run_alone
from draftsmith.inference.server.serve_command import register

run_alone("draftsmith serve", register)

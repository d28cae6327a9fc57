"""`python -m draftsmith.inference.serve`: the name that older guides have for the server."""

from draftsmith.inference.console import run_alone
from draftsmith.inference.server.serve_command import register

if __name__ == "__main__":
    run_alone("draftsmith serve", register)

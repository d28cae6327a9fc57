"""`python -m draftsmith.inference.server` serves, as `draftsmith serve` does."""

from draftsmith.inference.server.command import main

main()

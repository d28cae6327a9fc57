"""`python -m inference.server` serves, as `draftsmith serve` does."""

from inference.server.command import main

main()

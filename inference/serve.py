"""`python -m draftsmith.inference.serve`: the name that older guides have for the server's command
(`draftsmith.inference.server`)."""

from draftsmith.inference.server.command import main

if __name__ == "__main__":
    main()

"""`python -m inference.serve`: the name that older guides have for the server's command
(`inference.server`)."""

from inference.server.command import main

if __name__ == "__main__":
    main()

"""A proxy before any OpenAI-compatible server, which logs its traffic and changes none of it."""

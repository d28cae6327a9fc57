"""Load tests of any OpenAI-compatible server, and its drafting certified. It knows no engine."""

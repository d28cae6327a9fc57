"""One request: its text, its response, its place. No model, cache or protocol belongs here."""

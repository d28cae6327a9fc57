"""`LLM`: from a user's arguments to an engine. No round of the engine and no HTTP belongs here."""

"""The decoding loop. No loading, no prompts and no HTTP belongs here."""

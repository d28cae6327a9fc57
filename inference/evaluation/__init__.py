"""Acceptance, speed and losslessness of a drafter on an engine. No report format belongs here."""

"""The drafters, a family a file, and the two bases they share. No training loop belongs here."""

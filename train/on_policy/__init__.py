"""Training on text of the current drafter, which the engine writes. No optimizer belongs here."""

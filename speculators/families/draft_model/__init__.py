"""The family whose drafter is a small language model. What only a head needs is not here."""

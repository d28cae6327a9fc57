"""The objective: divergences, the chunked walk over the vocabulary, what a step reports. No
optimizer, no data and no family belongs here."""

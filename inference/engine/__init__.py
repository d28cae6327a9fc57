"""The loop: prefill, draft, verify, commit, for the rows of a batch.

`engine.py` is the loop on one page; log-probabilities lie beside it.
No loading, no prompts and no HTTP belongs here.
"""

"""The objective: divergences, the chunked walk over the vocabulary, what a step reports.

Tensors in, a loss and its figures out.
No optimizer, no data and no family belongs here.
"""

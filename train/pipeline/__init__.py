"""The stages of a run, in their order, and what is done with a finished one: again, compared,
published.

Each stage is passed over if its result is there.
How a stage does its work belongs in another package.
"""

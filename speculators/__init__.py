"""The lowest layer: what a drafter is.

The contract that every family implements (`drafter.py`), its config and options, errors, the
registry of families. Nothing here drafts, measures or trains: no import from `inference` or
`train`."""

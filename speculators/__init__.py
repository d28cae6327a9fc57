"""Ground floor: what a drafter is.

The contract every family meets (`drafter.py`), its config and options, errors, the families by name.
Nothing here drafts, measures or trains: no import from `inference` or `train`.
"""

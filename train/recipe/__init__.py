"""The recipe: its sections, its file, its overrides, its schema, and the names of what a run
leaves.

A key has its type, its default and its reason here.
No data is read here and no weight is loaded.
"""

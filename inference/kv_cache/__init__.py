"""Keys and values: the ragged cache, prefixes taken over from other rows, a limit of memory.

Rows and positions; of a drafter only the Protocol `DraftCache`.
No sampling, no drafting and no verification belongs here.
"""

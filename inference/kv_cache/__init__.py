"""Keys and values: a cache whose rows differ in length.

Rows and positions; no sampling, no drafting and no verification belongs here.
"""

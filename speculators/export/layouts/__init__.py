"""One table per family and file format: names of tensors and fields, written and read by the same
table.

A layout knows a config and a format's fields.
No weights are computed here, and no engine is imported.
"""

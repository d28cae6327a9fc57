"""The layers heads are built of: decoder layers, attention over unrolled depths, borrowed and frozen layers.

They know a config and tensors.
No family, no target and no file format belongs here.
"""

"""The layers of heads: decoder layers, attention over unrolled depths, layers of the target's kind,
frozen layers.

They work on a config and tensors.
Families, targets and file formats belong elsewhere.
"""

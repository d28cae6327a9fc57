"""A table per family and format: names of tensors and fields. No weights are computed here."""

"""A layout per family, and formats that are given one: which tensors and fields a drafter's folder
has, under which names, and what engines do with it. Weights are renamed, split and joined here, and
none is computed. `base.py` has what a layout states, `format.py` what a format adds."""

"""torch.compile for rounds: static shapes, CUDA graphs, who asks for it.

It replaces the forward passes of a round with compiled ones.
Nothing that a round decides belongs here.
"""

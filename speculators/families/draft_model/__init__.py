"""The family whose drafter is a small language model: the module, drafting with it, students, a
fast decoder.

It derives from the same contract as every head.
Nothing that only a head needs belongs here.
"""

"""From sources to masked, packed rows: reading, proving masks, selection, refusals.

It knows text and token ids.
No model and no loss belongs here.
"""

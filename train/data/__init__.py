"""From sources to masked, packed rows: reading, proving masks, selection, refusals. It knows text
and token ids, no model and no loss."""

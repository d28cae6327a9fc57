"""acceptance.json: its schema, how it is put together, and how it is shown (table, page, charts,
model card).

It knows results, not where they come from.
Nothing here runs a model.
"""

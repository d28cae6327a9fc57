"""acceptance.json, and how it is shown. It knows results; nothing here runs a model."""

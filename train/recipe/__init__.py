"""The recipe: sections, file, overrides, schema, and the names of what a run leaves. A key has its
type, its default and its reason here; no data is read and no weight is loaded."""

"""The commands of `draftsmith`: options in, a table or JSON out; no work of another package."""

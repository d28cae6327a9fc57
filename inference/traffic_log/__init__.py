"""The log of a server's traffic: its records, its files, what is kept of it, and what is removed
before anything is written. Knows no HTTP and no model."""

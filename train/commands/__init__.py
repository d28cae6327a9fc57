"""What `draftsmith` prints: one file per command that is more than a few lines.

Options in, a table or JSON out.
No work is done here that another room could do.
"""

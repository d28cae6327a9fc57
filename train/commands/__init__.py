"""The commands of `draftsmith` that are more than a few lines, a file each.

Options in, a table or JSON out.
No work is done here that another package could do.
"""

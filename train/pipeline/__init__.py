"""The stages of a run, each passed over if its result is there, and what is done with a finished
one: again, compared, published. How a stage does its work belongs in another package."""

"""One model run over rows of a cache: its weights in fast form, eager or compiled. Nothing that a
round decides belongs here."""

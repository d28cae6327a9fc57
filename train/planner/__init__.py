"""Time and memory of a run before it starts, by formula. No stage of a run is started here."""

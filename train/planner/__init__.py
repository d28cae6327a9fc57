"""Time and memory of a run before it starts.

It reads a recipe and a target's config, on the meta device.
No stage of a run is started here.
"""

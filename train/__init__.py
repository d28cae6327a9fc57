"""The highest layer: training a drafter, from a recipe to a measured export.

Beside the packages lie the launchers for `accelerate launch` and the `draftsmith` command.
Under `accelerate launch` this folder is first on sys.path: no name here may be that of a library.
"""

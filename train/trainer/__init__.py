"""The training loop and its parts: batches, optimizers, checkpoints, processes, telemetry.

It knows any drafter by its contract.
No family, no file format and no stage of a run belongs here.
"""

"""The training loop: batches, optimizers, checkpoints, processes, telemetry. It knows any drafter
by its contract, no family, no file format and no stage of a run."""

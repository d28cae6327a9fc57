"""Rounds under torch.compile at static shapes. Nothing that a round decides belongs here."""

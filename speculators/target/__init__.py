"""The frozen target: features, logits, probes, sharding. It knows no drafter and no loss."""

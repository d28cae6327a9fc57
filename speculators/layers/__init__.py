"""The layers of heads, and frozen layers. They know a config and tensors, no family, no target."""

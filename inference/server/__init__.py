"""The OpenAI-compatible server: HTTP, and the engine's thread. A round is the engine's business."""

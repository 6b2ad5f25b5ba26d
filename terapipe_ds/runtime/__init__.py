"""What runs slices: the engine, its channels, the KV context and attention. Knows no model."""

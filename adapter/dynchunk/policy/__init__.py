"""Pure arithmetic: how large a chunk may be. No engine, no torch, no input or output."""

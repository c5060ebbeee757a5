"""`./dynchunk top`: what a running server is doing, from its /metrics."""

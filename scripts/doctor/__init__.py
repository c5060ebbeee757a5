"""`./dynchunk doctor`: is this machine and this setting safe? Reads, never changes anything; needs no GPU."""

"""`./dynchunk collect`: one archive that says how a server is set up and what it did, without its secrets."""

"""The command line around the engine: serve, health, status. Nothing here imports SGLang or torch."""

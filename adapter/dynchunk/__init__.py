"""DynChunk: keeps SGLang's long-prompt prefill inside a memory budget. See ARCHITECTURE.md."""

__version__ = "0.1.0"

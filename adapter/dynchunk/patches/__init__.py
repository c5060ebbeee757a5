"""One file per engine module that DynChunk changes: the only code that names SGLang.

Each file has `apply(module)`, called right after the engine module has executed, and its contracts (contract.py).
"""

"""What make_model.py writes is of this architecture."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM

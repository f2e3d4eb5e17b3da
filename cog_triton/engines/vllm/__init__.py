"""The vLLM family: Hugging Face weights behind both of Triton's contracts.

Three processes stand in a row. vLLM's own EngineCore computes. Above it `host` runs AsyncLLM, in a
child of the Triton model ``tensorrt_llm``: it is shared by that model (token ids) and by
``vllm_model`` (text), which are two stubs of Triton's; it keeps AsyncLLM's work, tokenizing and
detokenizing included, off the GIL under which a stub sends responses; and it may run in another
Python than the stub's, whose numpy vLLM does not take. The stubs speak to it as to any
`cog_triton.backend.engine_process`.

Only `engine_api` imports vLLM; ``argument_types.json`` says which version it was written against.
"""

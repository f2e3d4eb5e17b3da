"""vLLM family: Hugging Face weights, served as token ids and as text.

Three processes: vLLM's EngineCore computes; the host (`engine_host`) runs AsyncLLM in a child of
the Triton model ``tensorrt_llm``; Triton's stubs are its clients. The host is shared by two stubs,
``tensorrt_llm`` (token ids) and ``vllm_model`` (text); it keeps AsyncLLM's work, tokenizing and
detokenizing included, off the GIL under which a stub sends responses; and it may run in another
Python than the stub's, whose numpy vLLM does not accept. The protocol is that of
`cog_triton.engines.engine_client`.

Only `engine_api` and the plugin `request_import` import vLLM; ``argument_types_*.json`` record its
interface, one a minor version.
"""

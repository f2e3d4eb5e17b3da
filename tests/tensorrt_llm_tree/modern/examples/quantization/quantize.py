"""Quantizes a Hugging Face model to a checkpoint."""

from tensorrt_llm import checkpoint
from tensorrt_llm.command_line import parser_of

if __name__ == "__main__":
    args = parser_of("quantization/quantize.py").parse_args()
    print(f"Initializing model from {args.model_dir}", flush=True)
    algorithm = checkpoint.ALGORITHMS[args.qformat]
    cache = args.kv_cache_dtype.upper() if args.kv_cache_dtype else None
    checkpoint.convert(args, "quantize.py", algorithm, cache)
    print(f"Quantized model exported to {args.output_dir}")

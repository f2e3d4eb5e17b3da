"""Converts a Hugging Face model of the family gpt to a checkpoint."""

from tensorrt_llm import __version__, checkpoint
from tensorrt_llm.command_line import parser_of


def main() -> None:
    print(__version__)
    args = parser_of("models/core/gpt/convert_checkpoint.py").parse_args()
    weight_only = {"int8": "W8A16", "int4": "W4A16"}
    algorithm = weight_only[args.weight_only_precision] if args.use_weight_only else None
    cache = "INT8" if args.int8_kv_cache else None
    checkpoint.convert(args, "convert_checkpoint.py", algorithm, cache)
    print("Total time of converting checkpoints: 00:00:00")


if __name__ == "__main__":
    main()

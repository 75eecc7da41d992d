"""vLLM: an engine for a small model without weights, which takes a part of the memory that it sees.

The model has two layers of Llama. vLLM profiles its memory, and gives the rest of its part to the
KV cache.
"""

import json
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# FlashInfer compiles its kernels with nvcc.
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ["VLLM_ATTENTION_BACKEND"] = "TRITON_ATTN"

import torch
from report import MIB, say
from vllm import LLM, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
}


def engine(model, utilization):
    return LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=utilization,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as model:
        with open(os.path.join(model, "config.json"), "w") as config:
            json.dump(MODEL, config)
        try:
            engine(model, 0.99)
            say(too_much="success")
        except ValueError as error:
            # A context takes more than one percent of a share.
            say(too_much=type(error).__name__)
        llm = engine(model, 0.7)
        prompt = {"prompt_token_ids": [1, 2, 3, 4]}
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True))
        say(tokens=len(answer.outputs[0].token_ids))
    say(total=torch.cuda.mem_get_info()[1], reserved=torch.cuda.memory_reserved() // (64 * MIB) * 64 * MIB)

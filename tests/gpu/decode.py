"""Times of a step of a token in PyTorch on the GPU, beside `--steps` of an emitted program: decode.py CONFIG BATCH CONTEXT

A transformers model of random weights in bf16 over a static cache of which the last tokens are free, launched kernel by kernel and
as a CUDA graph.
"""

import sys

import torch
from attention import time
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache


def main():
    config, batch, context = AutoConfig.from_pretrained(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(1)
    with torch.device("cuda"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        cache = StaticCache(config=config, max_cache_len=context)
        # Tokens of the times below.
        last = context - 64
        for at in range(0, last, 512):
            model(torch.randint(0, config.vocab_size, (batch, min(512, last - at))), past_key_values=cache, logits_to_keep=1)
        ids = torch.randint(0, config.vocab_size, (batch, 1))

        def step():
            return model(ids, past_key_values=cache).logits.argmax(-1)

        print(f"PyTorch {torch.__version__}, {batch} sequences of {context} tokens")
        print(f"a token {time(step):.3f} ms")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        print(f"a token as a graph {time(graph.replay):.3f} ms")


main()

"""Times of PyTorch on the GPU, beside `--steps` of an emitted program: step.py CONFIG TOKENS

A transformers model of random weights in bf16, with PyTorch's attention: one sequence forward, and forward, backward and AdamW.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attention import time


def main():
    config, tokens = AutoConfig.from_pretrained(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        ids = torch.randint(0, config.vocab_size, (1, tokens))

    def forward():
        with torch.no_grad():
            model(ids, logits_to_keep=1, use_cache=False)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def train():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"PyTorch {torch.__version__}, {tokens} tokens")
    print(f"forward {time(forward):.3f} ms")
    print(f"training step {time(train):.3f} ms")


main()

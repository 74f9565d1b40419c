"""Times of PyTorch's attention on the GPU, for shapes that `tests/gpu.sh` measures ours in."""

import torch

def time(run, n=20):
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(n):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / n


def measure(s, h, k, d, e):
    q, k_, v = (
        torch.randn(1, n, s, w, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n, w in ((h, d), (k, d), (k, e))
    )

    def forward():
        wide = [x.repeat_interleave(h // k, dim=1) for x in (k_, v)]
        return torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=True)

    def both():
        forward().sum().backward()

    print(f"{s} tokens, {h} heads on {k}, {d},{e}: attention {time(forward):.3f} ms, forward and backward {time(both):.3f} ms")


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}")
    measure(4096, 32, 8, 128, 128)
    for d, e in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        measure(8192, 2048 // d, 2048 // d, d, e)

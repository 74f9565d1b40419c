def block(layer, x):
    t1 = weight(f"model.layers.{layer}.input_layernorm.weight", "bf16[m]")
    t2 = rms_norm(x, t1, 2, eps=1e-5)
    t3 = weight(f"model.layers.{layer}.self_attn.q_proj.weight", "bf16[h d m]", stored=(4096, 4096))
    t4 = einsum("bsm,hdm->bshd", t2, t3)
    t5 = weight(f"model.layers.{layer}.self_attn.k_proj.weight", "bf16[k d m]", stored=(1024, 4096))
    t6 = einsum("bsm,kdm->bskd", t2, t5)
    t7 = weight(f"model.layers.{layer}.self_attn.v_proj.weight", "bf16[k d m]", stored=(1024, 4096))
    v = einsum("bsm,kdm->bskd", t2, t7)
    positions_ = positions(0, "i32[s@ulysses]")
    q = rotary(t4, positions_, "b s h d", "s", "d", width=128, theta=500000.0, scaling=("none", {}))
    k = rotary(t6, positions_, "b s k d", "s", "d", width=128, theta=500000.0, scaling=("none", {}))
    t12, t13, t14 = all_to_all(("ulysses",), (q, "bf16[b s@ulysses h d]", "bf16[b s h@ulysses d]"), (k,
            "bf16[b s@ulysses k d]", "bf16[b s k@ulysses d]"), (v, "bf16[b s@ulysses k d]",
            "bf16[b s k@ulysses d]")).wait()
    t15 = attention(t12, t13, t14, types=("bf16[b s h@ulysses d]", "bf16[b s k@ulysses d]"), mask=("causal",),
            scale=0.08838834764831843)
    transfer1 = all_to_all(("ulysses",), (t15, "bf16[b s h@ulysses d]", "bf16[b s@ulysses h d]"))
    t17 = weight(f"model.layers.{layer}.self_attn.o_proj.weight", "bf16[m h d]", stored=(4096, 4096))
    mixed = transfer1.wait()
    attended = x + einsum("bshd,mhd->bsm", mixed, t17)
    t19 = weight(f"model.layers.{layer}.post_attention_layernorm.weight", "bf16[m]")
    t20 = rms_norm(attended, t19, 2, eps=1e-5)
    t21 = weight(f"model.layers.{layer}.mlp.gate_proj.weight", "bf16[f m]")
    t22 = weight(f"model.layers.{layer}.mlp.up_proj.weight", "bf16[f m]")
    t23, t24 = einsum("bsm,fm->bsf", t20, t21), einsum("bsm,fm->bsf", t20, t22)
    t25 = F.silu(t23) * t24
    t26 = weight(f"model.layers.{layer}.mlp.down_proj.weight", "bf16[m f]")
    y = attended + einsum("bsf,mf->bsm", t25, t26)
    return y

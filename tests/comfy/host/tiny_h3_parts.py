"""Tiny H3 parts: the tensors of each synthetic MiniMax-H3 file."""

import hashlib
import math

import torch


class Maker:
    """Collects named tensors; each one's values depend on the seed and its name alone."""

    def __init__(self, seed, dtype):
        self.seed, self.dtype, self.sd = seed, dtype, {}

    def randn(self, name, shape):
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        gen = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(*shape, generator=gen)

    def put(self, name, value, dtype=None):
        self.sd[name] = value.to(dtype or self.dtype).contiguous()

    def weight(self, name, shape, gain=1.0, dtype=None):
        """A weight with the fan-in of dims 1.. and unit output variance times gain."""
        fan_in = math.prod(shape[1:])
        self.put(name, self.randn(name, shape) * (gain / math.sqrt(fan_in)), dtype)

    def linear(self, name, n_in, n_out, bias=True, gain=1.0, dtype=None):
        self.weight(name + ".weight", (n_out, n_in), gain, dtype)
        if bias:
            self.put(name + ".bias", self.randn(name + ".bias", (n_out,)) * 0.02, dtype)

    def conv(self, name, n_in, n_out, kernel, bias=True, gain=1.0):
        self.weight(name + ".weight", (n_out, n_in, *kernel), gain)
        if bias:
            self.put(name + ".bias", self.randn(name + ".bias", (n_out,)) * 0.02)

    def norm(self, name, n, bias=False, dtype=None, scale=1.0):
        self.put(name + ".weight", scale * (1.0 + 0.05 * self.randn(name + ".weight", (n,))), dtype)
        if bias:
            self.put(name + ".bias", 0.02 * self.randn(name + ".bias", (n,)), dtype)


# ---- DiT ---------------------------------------------------------------------


def make_dit(m, c, text_dim, curve=True):
    hid, head_dim = c["hidden_size"], c["attention_head_dim"]
    inner, ffn = c["num_attention_heads"] * head_dim, c["ffn_hidden_size"]
    if text_dim == hid:
        raise SystemExit(
            "text_dim must differ from hidden_size: H3 takes equal widths for refined text"
        )
    f32 = torch.float32
    quantizable = []

    def block(p):
        m.norm(p + ".norm1", hid)
        m.norm(p + ".norm2", hid)
        m.linear(p + ".attn.qkv_proj", hid, inner * 3, bias=False)
        # random weights alone give near-uniform attention, which no test would notice
        # breaking; this peaks it (logits of standard deviation 3) and lets it weigh more
        m.norm(p + ".attn.q_norm", head_dim, scale=3.0**0.5)
        m.norm(p + ".attn.k_norm", head_dim, scale=3.0**0.5)
        m.linear(p + ".attn.out_proj", inner, hid, bias=False, gain=2.0)
        m.linear(p + ".mlp.fc1", hid, ffn * 2, bias=False)
        m.linear(p + ".mlp.fc2", ffn, hid, bias=False)
        quantizable.extend(
            p + s for s in (".attn.qkv_proj", ".attn.out_proj", ".mlp.fc1", ".mlp.fc2")
        )

    m.linear("video_patch_proj", c["latents_dim"] * 4, hid, dtype=f32)
    m.linear("audio_patch_proj", c["audio_latents_dim"], hid, dtype=f32)
    m.linear("condition_proj", text_dim, hid)
    if curve:
        # as the released "pruned" files: a table of coordinates over t replaces the time embedder
        t_dim, grid = c["adaln_curve_dim"], c["adaln_curve_grid"]
        t = torch.linspace(0, 1, grid)[:, None]
        k = torch.arange(1, t_dim + 1)[None]
        m.put("adaln_t_table", torch.cos(math.pi * k * t / 2), f32)
        adaln_dtype = f32
    else:
        t_dim = c["time_embed_dim"]
        m.linear(
            "time_embedder.proj_in", c["timestep_input_dim"], c["time_embed_hidden_size"], dtype=f32
        )
        m.linear("time_embedder.proj_out", c["time_embed_hidden_size"], t_dim, dtype=f32)
        adaln_dtype = None
    n = c["rope_inv_freq_len"]
    m.put("rope.inv_freq", 10000.0 ** (-torch.arange(n, dtype=torch.float64) / n), f32)
    for i in range(c["token_refiner_num_layers"]):
        block(f"token_refiner.blocks.{i}")
    m.norm("token_refiner.final_norm", hid)
    for i in range(c["num_layers"]):
        block(f"blocks.{i}")
        m.linear(f"blocks.{i}.adaln_proj.linear", t_dim, 6 * hid * 3, gain=0.5, dtype=adaln_dtype)
    m.norm("final_layer.norm", hid)
    m.linear("final_layer.adaln_proj.linear", t_dim, 2 * hid, gain=0.2, dtype=adaln_dtype)
    m.linear("final_layer.video_out", hid, c["latents_dim"] * 4, dtype=f32)
    m.linear("final_layer.audio_out", hid, c["audio_latents_dim"], dtype=f32)
    return quantizable


def make_lora(m, c, rank=4):
    hid, inner = c["hidden_size"], c["num_attention_heads"] * c["attention_head_dim"]
    for i in range(c["num_layers"]):
        for name, n_in, n_out in (("attn.qkv_proj", hid, inner * 3), ("attn.out_proj", inner, hid)):
            p = f"diffusion_model.blocks.{i}.{name}"
            m.weight(p + ".lora_A.weight", (rank, n_in))
            m.weight(p + ".lora_B.weight", (n_out, rank), gain=0.1)


# ---- VAEs --------------------------------------------------------------------


def make_video_vae(m, c, z=24, in_channels=3):
    mid = [c["ch"] * k for k in c["ch_mult"]]
    block_in = [mid[0], *mid[:-1]]
    space_down, time_down = (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1)
    k3, k1 = (3, 3, 3), (1, 1, 1)
    m.conv("encoder.conv_in", in_channels, mid[0], k3)
    for i, width in enumerate(mid):
        for j in range(c["num_res_blocks"]):
            p, n_in = f"encoder.down.{i}.block.{j}", block_in[i] if j == 0 else width
            m.norm(p + ".norm1", n_in, bias=True)
            m.norm(p + ".norm2", width, bias=True)
            m.conv(p + ".conv1", n_in, width, k3)
            m.conv(p + ".conv2", width, width, k3)
            if n_in != width:
                m.conv(p + ".nin_shortcut", n_in, width, k1)
        if space_down[i] * time_down[i] > 1:
            m.conv(f"encoder.down.{i}.downsample.conv", width, width, k3)
    m.norm("encoder.norm_out", mid[-1], bias=True)
    m.conv("encoder.conv_out", mid[-1], 2 * z, k3)
    m.conv("quant_conv", 2 * z, 2 * z, k1)
    m.conv("post_quant_conv", z, z, k1)

    heads, dim_head = c["decoder_heads"], c["decoder_dim_head"]
    dim = heads * dim_head
    m.linear("decoder.x_embedder", z, dim)
    m.put("decoder.register_tokens", 0.02 * m.randn("decoder.register_tokens", (1, 4, dim)))
    m.put("decoder.mask_token", torch.zeros(1, 1, dim))
    for i in range(c["decoder_layers"]):
        p = f"decoder.transformer_blocks.{i}"
        m.norm(p + ".norm1", dim)
        m.norm(p + ".norm2", dim)
        m.linear(p + ".attn.to_qkv", dim, 3 * dim)
        m.linear(p + ".attn.to_out", dim, dim)
        m.linear(p + ".ff.w1", dim, 8 * dim)
        m.linear(p + ".ff.w2", 4 * dim, dim)
        for s in (".scale1", ".scale2"):
            m.put(p + s, 0.2 + 0.05 * m.randn(p + s, (dim,)))
    m.norm("decoder.norm_out", dim, bias=True)
    m.linear("decoder.proj_out", dim, 3 * 4 * 16 * 16)
    m.put("latents_mean", torch.zeros(z), torch.float32)
    m.put("latents_std", torch.ones(z), torch.float32)


def make_taeh3(m, z=24):
    """The small autoencoder of the TAEHV family; widths are fixed by ComfyUI."""
    k3, k1 = (3, 3), (1, 1)

    def memblock(p, n):
        m.conv(p + ".conv.0", 2 * n, n, k3)
        m.conv(p + ".conv.2", n, n, k3)
        m.conv(p + ".conv.4", n, n, k3, gain=0.5)

    m.conv("encoder.0", 12, 64, k3)
    i = 2
    for stride in (2, 2, 1):
        m.conv(f"encoder.{i}.conv", 64 * stride, 64, k1, bias=False)
        m.conv(f"encoder.{i + 1}", 64, 64, k3, bias=False)
        for j in range(3):
            memblock(f"encoder.{i + 2 + j}", 64)
        i += 5
    m.conv(f"encoder.{i}", 64, z, k3)
    widths, grow = (256, 128, 64, 64), (1, 2, 2)
    m.conv("decoder.1", z, widths[0], k3)
    i = 3
    for level in range(3):
        n = widths[level]
        for j in range(3):
            memblock(f"decoder.{i + j}", n)
        m.conv(f"decoder.{i + 4}.conv", n, n * grow[level], k1, bias=False)
        m.conv(f"decoder.{i + 5}", n, widths[level + 1], k3, bias=False)
        i += 6
    m.conv(f"decoder.{i + 1}", widths[3], 12, k3, gain=0.5)
    m.put(f"decoder.{i + 1}.bias", torch.full((12,), 0.5))


def lowpass(taps=12, cutoff=0.25):
    t = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    h = torch.sinc(2 * cutoff * t) * torch.hann_window(taps, periodic=False, dtype=torch.float64)
    return (h / h.sum()).float().view(1, 1, taps)


def make_audio_vae(m, c, z=32):
    d, latent, dec = c["encoder_dim"], c["latent_dim"], c["decoder_dim"]

    def alpha(name, n):
        m.put(name, 1.0 + 0.1 * m.randn(name, (1, n, 1)).abs())

    m.conv("encoder.block.0", 1, d, (7,))
    for i, stride in enumerate((2, 4, 4, 5, 5)):
        p = f"encoder.block.{i + 1}.block"
        for j in range(3):
            alpha(f"{p}.{j}.block.0.alpha", d)
            m.conv(f"{p}.{j}.block.1", d, d, (7,))
            alpha(f"{p}.{j}.block.2.alpha", d)
            m.conv(f"{p}.{j}.block.3", d, d, (1,), gain=0.3)
        alpha(f"{p}.3.alpha", d)
        m.conv(f"{p}.4", d, 2 * d, (2 * stride,))
        d *= 2
    alpha("encoder.block.6.alpha", d)
    m.conv("encoder.block.7", d, latent, (3,))

    for n in ("norm1", "norm3"):
        m.norm("pre_block." + n, latent, bias=True)
    m.norm("pre_block.norm2", z, bias=True)
    m.linear("pre_block.attn.qkv", latent, 3 * latent, bias=False)
    for n in ("q_bias", "v_bias", "zero_k_bias"):
        m.put("pre_block.attn." + n, torch.zeros(latent))
    m.linear("pre_block.attn.proj", z, z)
    m.linear("pre_block.proj", latent, z)
    m.norm("pre_block.mlp.norm", z, bias=True)
    m.linear("pre_block.mlp.w0", z, 2 * z)
    m.linear("pre_block.mlp.w1", z, 2 * z)
    m.linear("pre_block.mlp.w2", 2 * z, z)
    for n in ("mean_proj", "logs_proj"):
        m.conv(n, z, z, (1,))
    m.conv("dec_in_proj", z, latent, (1,))

    def activation(p, n):
        for s in ("alpha", "beta"):
            m.put(f"{p}.act.{s}", 0.1 * m.randn(f"{p}.act.{s}", (n,)))
        m.put(p + ".upsample.filter", lowpass())
        m.put(p + ".downsample.lowpass.filter", lowpass())

    m.conv("decoder.conv_pre", latent, dec, (7,))
    ch = dec
    for i, kernel in enumerate((9, 9, 4, 4, 4, 4, 4)):
        p = f"decoder.ups.{i}.0"
        m.put(p + ".weight", m.randn(p + ".weight", (ch, ch // 2, kernel)) / math.sqrt(ch * 2))
        ch //= 2
        m.put(p + ".bias", torch.zeros(ch))
        for j, kernel_size in enumerate((3, 7, 11)):
            p = f"decoder.resblocks.{3 * i + j}"
            for n in range(3):
                m.conv(f"{p}.convs1.{n}", ch, ch, (kernel_size,), gain=0.5)
                m.conv(f"{p}.convs2.{n}", ch, ch, (kernel_size,), gain=0.3)
            for n in range(6):
                activation(f"{p}.activations.{n}", ch)
    activation("decoder.activation_post", ch)
    m.conv("decoder.conv_post", ch, 1, (7,), bias=False, gain=0.3)
    m.put("latents_mean", torch.zeros(z))
    m.put("latents_std", torch.ones(z))


# ---- text encoder ------------------------------------------------------------


def make_text_encoder(m, c):
    hid, inner = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    kv, mlp = c["num_key_value_heads"] * c["head_dim"], c["intermediate_size"]
    name = "model.embed_tokens.weight"
    m.put(name, m.randn(name, (c["vocab_size"], hid)))
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        m.norm(p + ".input_layernorm", hid)
        m.norm(p + ".post_attention_layernorm", hid)
        m.linear(p + ".self_attn.q_proj", hid, inner, bias=False)
        m.linear(p + ".self_attn.k_proj", hid, kv, bias=False)
        m.linear(p + ".self_attn.v_proj", hid, kv, bias=False)
        m.linear(p + ".self_attn.o_proj", inner, hid, bias=False, gain=0.2)
        m.norm(p + ".self_attn.q_norm", c["head_dim"])
        m.norm(p + ".self_attn.k_norm", c["head_dim"])
        m.linear(p + ".mlp.gate_proj", hid, mlp, bias=False)
        m.linear(p + ".mlp.up_proj", hid, mlp, bias=False)
        m.linear(p + ".mlp.down_proj", mlp, hid, bias=False, gain=0.2)
    v, vm = c["vision_hidden_size"], c["vision_intermediate_size"]
    m.conv("visual.patch_embed.proj", 3, v, (2, 16, 16))
    m.put("visual.pos_embed.weight", 0.02 * m.randn("visual.pos_embed.weight", (2304, v)))
    for i in range(c["vision_depth"]):
        p = f"visual.blocks.{i}"
        m.norm(p + ".norm1", v, bias=True)
        m.norm(p + ".norm2", v, bias=True)
        m.linear(p + ".attn.qkv", v, 3 * v)
        m.linear(p + ".attn.proj", v, v, gain=0.2)
        m.linear(p + ".mlp.linear_fc1", v, vm)
        m.linear(p + ".mlp.linear_fc2", vm, v, gain=0.2)
    mergers = [("visual.merger", v)]
    mergers += [
        (f"visual.deepstack_merger_list.{i}", 4 * v) for i in range(len(c["vision_deepstack"]))
    ]
    for p, norm_dim in mergers:
        m.norm(p + ".norm", norm_dim, bias=True)
        m.linear(p + ".linear_fc1", 4 * v, 4 * v)
        m.linear(p + ".linear_fc2", 4 * v, hid)

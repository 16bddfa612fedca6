"""Make tiny synthetic MiniMax-H3 files that ComfyUI's own loaders accept.

Needs torch and safetensors only (comfy-kitchen for --quant int8_convrot and nvfp4); no ComfyUI. Every tensor
is a pseudo-random function of the seed and its own name, so that files can be made again and two
variants of one file (bf16 and int8) hold the same model.

    make_tiny_h3.py OUT                             all files, in ComfyUI's models/ layout
    make_tiny_h3.py OUT --names template            named as in ComfyUI's own H3 templates
    make_tiny_h3.py OUT --only dit --quant int8     one file, another storage

ComfyUI reads the sizes of the DiT from its file; taeh3 has its real size. The sizes of the VAEs and
of the text encoder are defaults of ComfyUI's code, which tiny_h3_host lowers to sizes.json.
"""

import argparse
import json
import sys
from pathlib import Path

import tiny_h3_parts as parts
import torch
from safetensors.torch import save_file

SIZES = Path(__file__).parent / "tiny_h3_host" / "sizes.json"

# part: (folder under models/, plain name, name in ComfyUI's H3 templates)
FILES = {
    "dit": ("diffusion_models", "tiny_h3_dit", "minimax_h3_fl2va_pruned_int8_convrot"),
    "video_vae": ("vae", "tiny_h3_video_vae", "minimax_h3_video_vae_fp16"),
    "taeh3": ("vae", "tiny_h3_taeh3", "taeh3"),
    "audio_vae": ("vae", "tiny_h3_audio_vae", "minimax_h3_audio_vae_fp32"),
    "text_encoder": ("text_encoders", "tiny_h3_qwen3vl", "qwen3vl_32b_minimax_h3_nvfp4_awq"),
    "lora": ("loras", "tiny_h3_lora", "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16"),
}
QUANTS = ("fp8", "int8", "int8_convrot", "nvfp4")
FP16_PARTS = ("video_vae", "taeh3")


def quantize(sd, layers, kind):
    """Give linear weights ComfyUI's quantised form: .weight, .weight_scale, .comfy_quant."""
    for layer in layers:
        w = sd[layer + ".weight"].float()
        conf = {"format": "int8_tensorwise"}
        if kind == "fp8":
            scale = w.abs().max() / 448.0
            q = (w / scale).to(torch.float8_e4m3fn)
            conf = {"format": "float8_e4m3fn"}
        elif kind == "int8":
            scale = w.abs().amax(dim=1, keepdim=True) / 127.0
            q = (w / scale).round().clamp(-127, 127).to(torch.int8)
        elif kind == "int8_convrot":
            from comfy_kitchen.tensor import TensorWiseINT8Layout

            q, params = TensorWiseINT8Layout.quantize(
                w, per_channel=True, convrot=True, convrot_groupsize=256
            )
            scale = params.scale
            conf.update(convrot=True, convrot_groupsize=256)
        elif kind == "nvfp4":
            from comfy_kitchen.tensor import TensorCoreNVFP4Layout

            q, params = TensorCoreNVFP4Layout.quantize(w.bfloat16(), w.abs().max() / (448 * 6))
            sd[layer + ".weight_scale_2"] = params.scale.float()
            scale = params.block_scale
            conf = {"format": "nvfp4"}
        else:
            raise SystemExit(f"unknown --quant {kind}")
        sd[layer + ".weight"] = q.contiguous()
        scale = scale if kind == "nvfp4" else scale.float()
        sd[layer + ".weight_scale"] = scale.contiguous()
        sd[layer + ".comfy_quant"] = torch.tensor(
            list(json.dumps(conf).encode()), dtype=torch.uint8
        )


def make(part: str, sizes: dict, *, seed: int, quant: str, time: str) -> dict[str, torch.Tensor]:
    """The tensors of one file."""
    dtype = torch.float16 if part in FP16_PARTS else torch.bfloat16
    maker = parts.Maker(seed, torch.float32 if part == "audio_vae" else dtype)
    if part == "dit":
        text_dim = sizes["text_encoder"]["hidden_size"]
        layers = parts.make_dit(maker, sizes["dit"], text_dim, time == "curve")
        if quant != "none":
            quantize(maker.sd, layers, quant)
    elif part == "taeh3":
        parts.make_taeh3(maker)
    elif part == "lora":
        parts.make_lora(maker, sizes["dit"])
    else:
        getattr(parts, f"make_{part}")(maker, sizes[part])
    return maker.sd


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make tiny synthetic MiniMax-H3 files.")
    parser.add_argument("out", type=Path, help="ComfyUI models folder to write into")
    parser.add_argument("--only", default=",".join(FILES), help="of " + ", ".join(FILES))
    parser.add_argument("--names", choices=["plain", "template"], default="plain")
    parser.add_argument("--quant", choices=["none", *QUANTS], default="none", help="of dit")
    parser.add_argument("--time", choices=["curve", "embedder"], default="curve", help="of dit")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    sizes = json.loads(SIZES.read_text(encoding="utf-8"))
    for part in args.only.split(","):
        folder, name, template_name = FILES[part]
        if args.names == "template":
            name = template_name
        elif part == "dit":
            name += "" if args.quant == "none" else f"_{args.quant}"
            name += "" if args.time == "curve" else f"_{args.time}"
        path = args.out / folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = make(part, sizes, seed=args.seed, quant=args.quant, time=args.time)
        save_file(tensors, path, metadata={"format": "pt", "made_by": "make_tiny_h3.py"})
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

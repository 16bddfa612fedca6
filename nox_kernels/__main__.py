"""Command line: python -m nox_kernels demo | doctor | build | bench."""

from __future__ import annotations

import argparse
import sys

from .errors import NoxError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nox_kernels",
        description="Attention modes for MiniMax-H3.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="render one clip in every attention mode and compare",
        description=(
            "Render the same clip with dense attention, sage, sparse at 15 and 50 %, and veda, and "
            "write a video with sound for each, one side by side, a summary and a route picture. Without "
            "--model a tiny synthetic H3 is made on the spot: it needs no GPU and no weights, and "
            "its pictures are noise."
        ),
    )
    demo.set_defaults(run=_demo)
    demo.add_argument(
        "--out", default="nox-demo", metavar="DIR", help="folder for the files (default nox-demo)"
    )
    demo.add_argument("--model", metavar="DIR", help="MiniMax-H3 weights in diffusers' layout")
    demo.add_argument(
        "--predictor", metavar="FILE", help="a Veda predictor, for mode veda with --model"
    )
    demo.add_argument("--prompt", metavar="TEXT", help="what the clip shows")
    demo.add_argument(
        "--width", type=int, help="pixels, a multiple of 32 (default 256; with --model 1344)"
    )
    demo.add_argument(
        "--height", type=int, help="pixels, a multiple of 32 (default 256; with --model 768)"
    )
    demo.add_argument("--seconds", type=float, default=5.0, help="length, 5 to 14.375 (default 5)")
    demo.add_argument("--steps", type=int, help="denoising steps (default 3; with --model 20)")
    demo.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can run and test that it computes right",
        description="Say what this machine can run and test that it computes right.",
    )
    doctor.set_defaults(run=_doctor)
    build = commands.add_parser(
        "build",
        help="compile the GPU kernels for every architecture",
        description="Compile the GPU kernels for every architecture; needs no GPU.",
    )
    build.set_defaults(run=_build)
    build.add_argument(
        "--out", default="dist", metavar="DIR", help="folder for the files (default dist)"
    )
    build.add_argument("--wheel", action="store_true", help="make the wheel nox-kernels too")
    build.add_argument("--nvrtc", metavar="FILE", help="NVRTC library to use")
    build.add_argument(
        "--any-nvrtc", action="store_true", help="take an NVRTC that a release may not use"
    )
    build.add_argument(
        "--arch", nargs="+", default=(), metavar="ARCH", help="only these, as sm_90a"
    )
    bench = commands.add_parser(
        "bench",
        help="measure every mode beside the other attention that is installed",
        description=(
            "Measure time, memory and error of one attention call in every mode, and of every "
            "other implementation that is installed, in turns in one process. Writes bench.json, "
            "bench.md and bench.png."
        ),
    )
    bench.set_defaults(run=_bench)
    bench.add_argument(
        "--out", default="nox-bench", metavar="DIR", help="folder for the files (default nox-bench)"
    )
    bench.add_argument(
        "--rows", nargs="+", type=int, help="packed rows S (default 7733 38304 104555)"
    )
    bench.add_argument("--heads", type=int, default=56, help="heads (default 56)")
    bench.add_argument("--repeats", type=int, default=12, help="timed calls each (default 12)")
    bench.add_argument(
        "--sets", nargs="+", metavar="SET", help="inputs (default normal strong outlier)"
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    bench.add_argument(
        "--plot-from", metavar="FILE", help="only draw the picture of a bench.json, beside it"
    )
    parser.set_defaults(run=None)
    return parser


# The commands load torch and more, which --help need not wait for.
def _demo(args: argparse.Namespace) -> int:
    from .demo import DemoRequest, main

    return main(
        DemoRequest(
            out=args.out,
            model=args.model,
            predictor=args.predictor,
            prompt=args.prompt,
            width=args.width,
            height=args.height,
            seconds=args.seconds,
            steps=args.steps,
            seed=args.seed,
        )
    )


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import main

    return main()


def _build(args: argparse.Namespace) -> int:
    from .build_command import BuildRequest, main

    return main(
        BuildRequest(
            out=args.out,
            makes_wheel=args.wheel,
            nvrtc_path=args.nvrtc,
            takes_any_nvrtc=args.any_nvrtc,
            architectures=tuple(args.arch),
        )
    )


def _bench(args: argparse.Namespace) -> int:
    from .bench.command import ROWS, SETS, BenchRequest, main

    return main(
        BenchRequest(
            out=args.out,
            rows=tuple(args.rows or ROWS),
            num_heads=args.heads,
            repeats=args.repeats,
            sets=tuple(args.sets or SETS),
            device=args.device,
            plot_from=args.plot_from,
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; 2 where the user has to change something."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except NoxError as error:
        print(f"nox: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("nox: PyTorch is not installed; run: pip install torch", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nnox: stopped", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())

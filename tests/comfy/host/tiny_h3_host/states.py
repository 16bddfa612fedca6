"""States: test-only nodes that tell what a run changes, and what it leaves behind."""

import gc
import logging

import comfy.ldm.minimax.model
import comfy.ldm.modules.attention
import comfy.model_patcher
import comfy.samplers
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

MODULES = (
    comfy.ldm.modules.attention,
    comfy.ldm.minimax.model,
    comfy.model_patcher,
    comfy.samplers,
)
# of a run; a patch and its session live as long as the model that carries them
OF_A_RUN = ("Run", "Forward", "AttentionOverride", "Plan", "LayerPlan", "Tiles")
log = logging.getLogger("tiny_h3_probe")


def snapshot(diffusion_model) -> dict[str, int]:
    """Every attribute of every module of the blocks, and ComfyUI's functions: name -> identity."""
    state = {}
    for name, module in diffusion_model.blocks.named_modules():
        state |= {f"blocks.{name} {key}": id(value) for key, value in vars(module).items()}
        state |= {f"blocks.{name} {hooks}": len(vars(module)[hooks]) for hooks in _HOOKS}
    for module in MODULES:
        for name, value in vars(module).items():
            state[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type):
                members = vars(value).items()
                state |= {f"{module.__name__}.{name}.{key}": id(part) for key, part in members}
    return state


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class TinyH3StateWatch(io.ComfyNode):
    """Logs what changed of H3's blocks and of ComfyUI's code while a run samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Behind the last patch of a chain it sees all of them."""
        return io.Schema(
            node_id="TinyH3StateWatch",
            category="testing",
            inputs=[io.Model.Input("model"), io.Int.Input("block", default=2)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, block) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        watch = StateWatch(model.model.diffusion_model)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "watch", watch.outer_sample)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", watch.forward)
        blocks = clone.model_options["transformer_options"].get("patches_replace", {})
        watch.previous = blocks.get("dit", {}).get(("double_block", block))
        clone.set_model_patch_replace(watch, "dit", "double_block", block)
        return io.NodeOutput(clone)


class StateWatch:
    """Compares with what there was before the first forward, once ComfyUI has loaded the model."""

    def __init__(self, diffusion_model):
        self.diffusion_model = diffusion_model
        self.previous = None
        self.before = None

    def outer_sample(self, executor, *args, **kwargs):
        """Around a run."""
        self.before = None
        try:
            return executor(*args, **kwargs)
        finally:
            self._compare("after the run")

    def forward(self, executor, *args, **kwargs):
        """Around an evaluation."""
        if self.before is None:
            self.before = snapshot(self.diffusion_model)
        out = executor(*args, **kwargs)
        self._compare("after a step")
        return out

    def __call__(self, args, extra):
        """Around a block, inside whose attention our override is in place."""
        inside = {**args, "transformer_options": {**args["transformer_options"]}}
        self._compare("in a step")
        run = args["transformer_options"].get("nox_run")
        log.info("probe watch: %d plans", len(run._plans) if run else 0)
        return self.previous(inside, extra) if self.previous else extra["original_block"](inside)

    def _compare(self, when: str) -> None:
        after = snapshot(self.diffusion_model)
        names = sorted(
            name for name in self.before.keys() | after if self.before.get(name) != after.get(name)
        )
        log.info("probe watch: changed %s: %s", when, ", ".join(names[:3]) or "nothing")


class TinyH3Leftovers(io.ComfyNode):
    """Shows which of Nox's objects of a run are still alive."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """`run` changes nothing but what ComfyUI's cache takes for new."""
        return io.Schema(
            node_id="TinyH3Leftovers",
            category="testing",
            is_output_node=True,
            inputs=[io.Int.Input("run", default=0, max=1 << 40)],
            outputs=[],
        )

    @classmethod
    def execute(cls, run) -> io.NodeOutput:
        """Class names, sorted; those of Nox's modules alone."""
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]
        ours = [
            kind for kind in kinds if "nox" in str(kind.__module__) and kind.__name__ in OF_A_RUN
        ]
        return io.NodeOutput(ui={"alive": sorted(kind.__name__ for kind in ours) or ["none"]})


class TinyH3HookBlocks(io.ComfyNode):
    """Changes a block while a run samples: what must never be."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The change ends with the step."""
        return io.Schema(
            node_id="TinyH3HookBlocks",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()

        def hooked(args, extra):
            block = model.model.diffusion_model.blocks[1]
            handle = block.register_forward_pre_hook(lambda module, inputs: None)
            hooked.handles.append(handle)
            return extra["original_block"](args)

        def remove(executor, *args, **kwargs):
            try:
                return executor(*args, **kwargs)
            finally:
                while hooked.handles:
                    hooked.handles.pop().remove()

        hooked.handles = []
        clone.set_model_patch_replace(hooked, "dit", "double_block", 1)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "hooked", remove)
        return io.NodeOutput(clone)


NODES = [TinyH3StateWatch, TinyH3Leftovers, TinyH3HookBlocks]

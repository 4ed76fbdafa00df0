"""Arguments in pinned host memory, for a compiler whose described devices do not know of it.

The description of NVIDIA GPUs (jax 0.10.2) names no memories. JAX leaves out of a sharding what devices do
not name. The program does say where its results lie. A donated argument that such a result overwrites lies
there too.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.mlir import ir

_KIND, _WRITTEN_OVER = "mhlo.memory_kind", "tf.aliasing_output"


def place_donated(lowered: jax.stages.Lowered) -> None:
    """Marks, in the lowered program, each donated argument that a result in pinned host memory overwrites."""
    module: Any = lowered.compiler_ir()
    with module.context:
        main = next(
            f for f in module.body.operations if ir.StringAttr(f.attributes["sym_name"]).value == "main"
        )
        named = lambda found: {item.name: item.attr for item in found}
        results = [named(ir.DictAttr(x)) for x in ir.ArrayAttr(main.attributes["res_attrs"])]
        arguments = [named(ir.DictAttr(x)) for x in ir.ArrayAttr(main.attributes["arg_attrs"])]
        for argument in arguments:
            if _WRITTEN_OVER in argument:
                result = results[ir.IntegerAttr(argument[_WRITTEN_OVER]).value]
                if ir.StringAttr(result[_KIND]).value == "pinned_host":
                    argument[_KIND] = result[_KIND]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(x) for x in arguments])

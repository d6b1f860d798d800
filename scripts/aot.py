"""Compile the Triton kernels to sm_90a cubins, without a GPU, and print their resources.

    python scripts/aot.py               all configurations (half an hour of one core at first)
    python scripts/aot.py --published   those of the models of benchmarks/cuda.py in bfloat16 (a minute at first)
    python scripts/aot.py --pairwise 60 a choice with every kernel and trait (a minute or two at first)
    python scripts/aot.py --triton DIR  with the Triton in DIR (`pip install --target DIR triton==3.6.*`)

Results are stored in .cache/aot by the version of Triton and a hash of the kernel's source, each when it is known: a
run that was stopped continues there. Below the table are the configurations that use stack, where spilled registers
are. Exits with 1 if one does not compile, exceeds a limit (shared memory of a Hopper block, bytes of stack), or adds in
another order than those that `deterministic` may use in its place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from scripts.configurations import Configuration

PUBLISHED = re.compile(
    r"attend_\w+ dtype=bf16 (ratio=7 head_dim=(64|128)|ratio=4 head_dim=64|ratio=2 head_dim=128) cap=False rows=\d+"
    r"|merge_split dtype=bf16 head_dim=(64|128)"
    r"|norm_row dtype=bf16 more=\w+ weight=True"
    r"|attend_row dtype=bf16 (head_dim=(64|128) norm=none|head_dim=128 norm=first\+weight)"
    r"|multiply_norm dtype=bf16 ranges=\w+ kind=(None|silu) weight=True .*"
    r"|rotate_heads dtype=bf16 (head_dim=(64|128) rotary=True norm=none|head_dim=128 rotary=True norm=first\+weight)"
    r"|multiply_range dtype=bf16 .*|(activate|embed)_block dtype=bf16 kind=0|(load|advance)_rows"
    r"|mix_block dtype=bf16 a=False|adjust_chunk dtype=bf16 cap=False|top_row dtype=bf16 cap=False cut=False"
    r"|(sum_chunk|draw_row|cut_row) (dtype=bf16 cap=False )?(cut=\w+ )?vocabulary=(131072|262144)"
)
"""Names of the configurations that Qwen2.5-0.5B, Qwen3-0.6B, Llama-3.2-1B and Qwen2.5-7B use, and truncation."""
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `scripts.configurations`
MOST_SHARED, MOST_STACK = 227 << 10, 64
"""Bytes of shared memory that a block of sm_90 can have, and of stack that a thread may use."""


@dataclass(frozen=True, slots=True)
class Result:
    """Resources of one compiled configuration."""

    name: str
    shared: int = 0
    registers: int = 0
    stack: int = 0
    instructions: str = ""
    """Tensor core instructions: "wgmma", the shape of "mma", or empty."""
    order: str = ""
    """The order of its sums (`order_of`)."""
    error: str = ""

    @property
    def is_within_limits(self) -> bool:
        return not self.error and self.shared <= MOST_SHARED and self.stack <= MOST_STACK


class Target:
    """Replaces Triton's driver: kernels ask it what they are compiled for (`language.begin_kernel`)."""

    def get_current_target(self) -> GPUTarget:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compiled(one: Configuration) -> Result:
    """Compile one configuration; read its resources from the cubin."""
    import triton
    from triton.compiler import ASTSource

    target = Target().get_current_target()
    triton.runtime.driver.set_active(Target())
    source = ASTSource(one.kernel, one.signature, dict(one.variant.constants), one.attributes)
    options = {
        "num_warps": one.variant.num_warps,
        "num_stages": one.variant.num_stages,
        "enable_fp_fusion": one.variant.fuses,
        "maxnreg": one.variant.max_registers,
        "launch_pdl": True,
    }
    try:
        kernel = triton.compile(source, target=target, options=options)
    except Exception as error:
        return Result(one.name, error="\n".join(f"{type(cause).__name__}: {cause}" for cause in causes(error)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    ptx = kernel.asm["ptx"]
    used = sorted({*re.findall(r"wgmma", ptx), *re.findall(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)})
    if not waits_first(ptx):
        return Result(one.name, error="it accesses memory before it waits for the kernel before it")
    order = order_of(kernel.asm["ttgir"])
    return Result(one.name, kernel.metadata.shared, int(found[1]), int(found[2]), " ".join(used), order)


def order_of(ttgir: str) -> str:
    """Return what determines the order of the sums of matrix products and of rows, as far as it is not in the source.

    That is the instruction, its number of inputs, and what it adds to; and how threads divide a row.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.M))
    found = set()
    for kind, onto, size, layout in re.findall(
        r"(tt\.dot|warp_group_dot) %\S+ %\S+ (%\w+).*? : [^<]*<(?:\d+x)*?(\d+)x[bf].*-> tensor<[^#]*(#\w+)>", ttgir
    ):
        instruction = re.sub(
            r"warpsPerCTA = \[.*?\], |(?<=instrShape = \[)1, |, order.*|sizePerThread.*", "", layouts[layout]
        )
        found.add(f"{kind} {instruction} of {size} onto {'zeros' if 'cst' in onto else 'a sum'}")
    for size, layout in re.findall(r"addf [^}]*\}\) : \(tensor<(?:\d+x)*?(\d+)xf32, (#\w+)>\) -> ", ttgir):
        divided = re.findall(r"(sizePerThread|threadsPerWarp|warpsPerCTA|instrShape) = \[.*?(\d+)\]", layouts[layout])
        found.add(f"rows of {size} by {divided}")
    return "; ".join(sorted(found))


ACCESS = re.compile(r"\b((ld|st|atom|red)\.[\w.:]*global|cp\.async\.\w+\.shared\.global)")
"""An access to the GPU's memory in PTX."""


def waits_first(ptx: str) -> bool:
    """Return whether a kernel waits for the one before it (`language.begin_kernel`) before it accesses memory."""
    wait, access = ptx.find("griddepcontrol.wait"), ACCESS.search(ptx)
    return 0 < wait < (len(ptx) if access is None else access.start())


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes; Triton's last one has the reason."""
    while error is not None:
        yield error
        error = error.__cause__


def compiled_by_name(name: str) -> Result:
    """Compile the configuration of this name, in a worker process."""
    from scripts.configurations import configurations

    return compiled(next(one for one in configurations() if one.name == name))


def digest(one: Configuration) -> str:
    """Return a hash of everything that a result depends on but the version of Triton."""
    variant = one.variant
    parts = (one.kernel.cache_key, one.signature, dict(variant.constants), one.attributes)
    options = (variant.num_warps, variant.num_stages, variant.fuses, variant.max_registers)
    return hashlib.sha256(repr((*parts, *options)).encode()).hexdigest()


class ResultCache:
    """Owns the file of results of one version of Triton: one JSON array [hash, result] per line."""

    def __init__(self, version: str) -> None:
        self._path = ROOT / ".cache" / "aot" / f"{version}.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._known = {key: Result(**fields) for key, fields in map(json.loads, lines)}

    def results(self, found: Iterable[Configuration], jobs: int) -> Iterator[Result]:
        """Yield the result of each configuration, known ones first; compile the others in `jobs` processes."""
        keys = {one.name: digest(one) for one in found}
        yield from (replace(self._known[key], name=name) for name, key in keys.items() if key in self._known)
        missing = [name for name, key in keys.items() if key not in self._known]
        if not missing:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; a worker would die with a lock
        with (
            ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=ignored) as pool,
            self._path.open("a") as file,
        ):
            for result in pool.map(compiled_by_name, missing):
                file.write(json.dumps([keys[result.name], asdict(result)]) + "\n")
                file.flush()
                yield result


def differing(found: Iterable[Configuration], results: Iterable[Result]) -> dict[str, set[str]]:
    """Return the orders of sums that must be one and are not, by name: of tiles; of a fused kernel and its parts."""
    order = {one.name: one.order for one in results}
    orders = defaultdict(set)
    for one in found:
        orders[one.sums].add(order[one.name])
        if one.parts and order.keys() >= set(one.parts):
            singly = {text for name in one.parts for text in order[name].split("; ") if text}
            orders[one.sums].add("; ".join(sorted(singly)))
    return {name: several for name, several in orders.items() if len(several) > 1}


def table(results: Iterable[Result]) -> Iterator[str]:
    """Yield a Markdown table with a line for each kernel: the largest value of each resource."""
    yield "| kernel | configurations | shared memory, bytes | registers | stack, bytes | tensor cores |"
    yield "|---|---|---|---|---|---|"
    for name, group in groupby(sorted(results, key=lambda one: one.name), key=lambda one: one.name.split()[0]):
        part = list(group)
        most = [max(getattr(one, field) for one in part) for field in ("shared", "registers", "stack")]
        used = ", ".join(sorted({one.instructions for one in part} - {""}))
        yield f"| `{name}` | {len(part)} | {most[0]:,} | {most[1]} | {most[2]} | {used or '-'} |"


def stacks(results: Iterable[Result]) -> Iterator[str]:
    """Yield a line for each configuration that uses stack, the largest first, after a line with their number."""
    using = sorted((one for one in results if one.stack), key=lambda one: (-one.stack, one.name))
    yield f"{len(using)} use stack{':' * bool(using)}"
    yield from (f"{one.stack:4} bytes  {one.name}" for one in using)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--triton", metavar="DIR", help="directory of an installed Triton; default: the environment's")
    parser.add_argument("--pairwise", type=int, metavar="N", help="compile a choice of at most N configurations")
    parser.add_argument("--published", action="store_true", help="compile those of four published models in bfloat16")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per configuration instead")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of the start of names")
    return parser.parse_args()


def main() -> int:
    """Compile; print the table and every configuration beyond a limit; return 1 if there is one."""
    given = arguments()
    if given.triton:
        sys.path.insert(0, str(Path(given.triton).resolve()))
    import triton

    from scripts.configurations import configurations, num_covered, pairwise

    whole = tuple(one for one in configurations() if re.match(given.only, one.name))
    whole = tuple(one for one in whole if not given.published or PUBLISHED.fullmatch(one.name))
    parts = {name for one in whole for name in one.parts}.difference(one.name for one in whole)
    whole += tuple(one for one in configurations() if one.name in parts)
    found = whole if given.pairwise is None else pairwise(whole, given.pairwise)
    started = time.monotonic()
    results = list(ResultCache(triton.__version__).results(found, given.jobs))
    if given.json:
        print("\n".join(json.dumps(asdict(one)) for one in results))
    else:
        print("\n".join(table(results)))
        print(
            f"\nTriton {triton.__version__}: {len(results)} configurations for sm_90a in "
            f"{time.monotonic() - started:.0f} s; {sum(bool(one.error) for one in results)} do not compile"
        )
        for size, name in ((1, "values"), (2, "pairs of values")):
            print(f"{num_covered(found, size)} of {num_covered(whole, size)} {name} of kernels and traits occur")
        print("\n".join(stacks(results)))
    beyond = [one for one in results if not one.is_within_limits]
    for one in beyond:
        print(f"{one.name}: {one.error or one}", file=sys.stderr)
    different = differing(found, results)
    for name, orders in different.items():
        print(f"{name}: orders of sums differ: {' | '.join(sorted(orders))}", file=sys.stderr)
    return int(bool(beyond or different))


if __name__ == "__main__":
    sys.exit(main())

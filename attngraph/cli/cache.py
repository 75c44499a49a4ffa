"""`attngraph cache`: what is kept on disk; `attngraph cache clear` removes it."""

import argparse
import json

from attngraph.codegen.cpu import toolchain
from attngraph.ir import cache_folder
from attngraph.saved.disk import Disk


def run(options: argparse.Namespace) -> int:
    where = toolchain.folder()
    disk = Disk(where)
    if options.action == "clear":
        disk.clear()
    graphs, graph_bytes = disk.usage()
    kernels = list(where.glob("*.so"))
    if options.action == "clear":
        for path in kernels:
            path.unlink(missing_ok=True)
        kernels = []
    kernel_bytes = sum(path.stat().st_size for path in kernels)
    if options.json:
        found = {
            "folder": str(where), "graphs": graphs, "graph_bytes": graph_bytes,
            "kernels": len(kernels), "kernel_bytes": kernel_bytes, "off": cache_folder.is_off(),
        }  # fmt: skip
        print(json.dumps(found))
        return 0
    print(f"{where}{' (graphs are not kept: ATTNGRAPH_CACHE is off)' * cache_folder.is_off()}")
    print(f"  {graphs} graph{'s' * (graphs != 1)}, {graph_bytes / 2**20:.1f} MiB")
    print(f"  {len(kernels)} compiled kernel{'s' * (len(kernels) != 1)}, {kernel_bytes / 2**20:.1f} MiB")
    return 0

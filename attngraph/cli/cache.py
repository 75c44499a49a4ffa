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
        for path in where.glob("*.so"):
            path.unlink(missing_ok=True)
    graphs, graph_bytes = disk.usage()
    kernels = [path.stat().st_size for path in where.glob("*.so")]
    if options.json:
        found = {
            "folder": str(where), "graphs": graphs, "graph_bytes": graph_bytes,
            "kernels": len(kernels), "kernel_bytes": sum(kernels), "off": cache_folder.is_off(),
        }  # fmt: skip
        print(json.dumps(found))
        return 0
    print(f"{where}{' (graphs are not kept: ATTNGRAPH_CACHE is off)' * cache_folder.is_off()}")
    print(f"  {graphs} graph{'s' * (graphs != 1)}, {graph_bytes / 2**20:.1f} MiB")
    print(f"  {len(kernels)} compiled kernel{'s' * (len(kernels) != 1)}, {sum(kernels) / 2**20:.1f} MiB")
    return 0

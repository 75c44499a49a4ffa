"""What every process needs, done once: a process per model is a copy of one that imported this.

Both compilers have compiled one small function, so that a model's seconds have no part of what is done once
per process or machine: imports, and small C++ programs that show which instructions the processor has.
"""

import torch

import attngraph

torch.set_num_threads(1)
torch._inductor.config.compile_threads = 1  # in this process, so that its seconds are counted
for compiled in (attngraph.compile(torch.sin), torch.compile(torch.sin)):
    compiled(torch.ones(8, 8))
torch._dynamo.reset()

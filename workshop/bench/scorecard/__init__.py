"""A scorecard of the Triton kernels, from their machine code; no GPU is needed.

    python -m workshop scorecard [--only causal] [--target sm_90] [--json card.json]

Kernels are compiled ahead of time for GPUs that need not be present. The loops over tiles are found in what
the assembler made, and what a tile costs there is counted: products against the fewest that the tile needs,
exponentials and other instructions per score, places where warps wait, spills. A model of the GPU turns the
counts into a predicted speed. FlexAttention's template and a plain kernel are compiled and counted alike.

    code.py     instructions and their loops       figures.py  what a loop costs, per tile and score
    nvidia.py   SASS by nvdisasm; ptxas's remarks  cards.py    GPUs, and the model that predicts
    amd.py      AMD's assembly                     budgets.py  figures that may not get worse, in budgets.json
    cells.py    which kernels                      suite.py    the command
    flex.py     FlexAttention's template           run.py      all cells
    plain.py    a plain kernel                         joins.py    decoding's second kernel

Nothing here is measured: a prediction ranks kernels and finds faults, it does not replace a GPU.
"""

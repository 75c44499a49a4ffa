"""What kernels say of how they ran since a model was compiled, put into its report."""

from __future__ import annotations

import dataclasses

from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.token_program import RUNNERS
from attngraph.report.entries import AttentionEntry, TokenProgramEntry
from attngraph.report.report import CompileReport


def with_remarks(report: CompileReport) -> CompileReport:
    """The report, with the remarks of kernels from running since."""
    runners = {runner.name: runner for runner in RUNNERS}

    def of_attention(entry: AttentionEntry) -> AttentionEntry:
        kernel = KERNELS.get(entry.kernel.name)
        remarks = () if kernel is None else kernel.remarks(parse(entry.program))
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=remarks))

    def of_tokens(entry: TokenProgramEntry) -> TokenProgramEntry:
        runner = runners.get(entry.kernel.name)
        remarks = () if runner is None else runner.remarks(entry.program)
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=remarks))

    return dataclasses.replace(
        report, attention=tuple(of_attention(entry) for entry in report.attention),
        programs=tuple(of_tokens(entry) for entry in report.programs),
    )  # fmt: skip

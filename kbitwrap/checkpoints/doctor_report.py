"""The result of one of the doctor's checks, and the report of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..reports import Bar, Report, counted, few, shown
from .measure import MergeMeasure

FINE = "fine"
FAULT = "fault"
NOT_MEASURED = "not measured"
_MAX_LINES = 30  # of the checks, in what ``print`` shows


@dataclass(frozen=True)
class Finding:
    """A fault: what it is, where it was found, the evidence, and what to do about it."""

    what: str
    where: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True)
class Examined:
    """A check that was made: what was looked at, where, and the outcome with its evidence.

    The outcome is ``"fine"``, ``"fault"``, whose evidence is the ``what`` of the
    finding, or ``"not measured"``, whose evidence says what it needs.
    """

    what: str
    where: str
    outcome: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.outcome}: {self.evidence}"


@dataclass(frozen=True)
class Result:
    """The result of a check: made by `fine`, `fault` or `not_measured`.

    ``what`` is the fault, or what could not be measured.
    """

    outcome: str
    evidence: str
    what: str = ""
    remedy: str = ""


Checks = Mapping[str, Callable[[Any], Result | None]]
"""Checks of one kind of subject, by name; ``None`` of one says that there is nothing to look at."""


def fine(evidence: str) -> Result:
    """The result of a check that found no fault."""
    return Result(FINE, evidence)


def fault(what: str, evidence: str, remedy: str) -> Result:
    """The result of a check that found a fault."""
    return Result(FAULT, evidence, what, remedy)


def not_measured(what: str, why: str) -> Result:
    """The result of a check that could not be made."""
    return Result(NOT_MEASURED, why, what)


@dataclass(frozen=True, repr=False)
class DoctorReport(Report):
    """The faults of a run. False where none was found.

    Attributes:
        subject: The path that was examined, or the class of the model.
        findings: The faults, each with ``what``, ``where``, ``evidence`` and
            ``remedy``.
        not_measured: What could not be told, and what that needs.
        looked_at: Every check made, each with ``what`` was looked at, ``where``, the
            ``outcome`` (``"fine"``, ``"fault"`` or ``"not measured"``) and the
            ``evidence``.
        merge: The measure of the merge, where the base and the adapter were given:
            ``kept`` and ``error`` (parts of the adapter's delta), ``onto`` and
            ``tensors``; else ``None``.
    """

    subject: str
    findings: tuple[Finding, ...]
    not_measured: tuple[str, ...]
    looked_at: tuple[Examined, ...] = ()
    merge: MergeMeasure | None = None

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        findings = few([str(finding) for finding in self.findings])
        return "\n".join([repr(self), *findings, *self._lines()])

    def _brief(self) -> str:
        return f"findings: {len(self.findings)}, not measured: {len(self.not_measured)}, {shown(self.subject)}"

    def _bars(self) -> list[Bar]:
        texts: dict[str, list[str]] = {}
        for finding in self.findings:
            texts.setdefault(finding.what, []).append(str(finding))
        return counted(texts, 3, " | ")

    def _lines(self) -> list[str]:
        # What is fine comes last, where the list is cut.
        in_order = sorted(self.looked_at, key=lambda check: check.outcome == FINE)
        return few([str(check) for check in in_order], _MAX_LINES)


class Examination:
    """Makes checks, one after the other, and keeps their results for the report."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._not_measured: list[str] = []
        self._looked_at: list[Examined] = []

    def make(self, checks: Checks, subject: Any, where: str) -> None:
        """Make the checks of a subject."""
        for name, check in checks.items():
            result = check(subject)
            if result is not None:
                self.add(name, where, result)

    def add(self, name: str, where: str, result: Result) -> None:
        """Add the result of one check."""
        evidence = result.evidence
        if result.outcome == FAULT:
            finding = Finding(result.what, where, evidence, result.remedy)
            self._findings.append(finding)
            evidence = result.what
        elif result.outcome == NOT_MEASURED:
            self._not_measured.append(f"{result.what}: {evidence}")

        self._looked_at.append(Examined(name, where, result.outcome, evidence))

    def report(self, subject: str, merge: MergeMeasure | None) -> DoctorReport:
        """The report of the checks that were made, and of the merge that was measured."""
        # each once: the checkpoints of a run lack the same
        lacking = dict.fromkeys(self._not_measured)
        return DoctorReport(
            subject,
            tuple(self._findings),
            tuple(lacking),
            tuple(self._looked_at),
            merge,
        )

"""The outcome of one of the doctor's checks, and the report of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..reports import Report, few, shown
from .measure import MergeMeasure

FINE = "fine"
FAULT = "fault"
NOT_MEASURED = "not measured"
_MAX_LINES = 30  # of the checks, in what ``print`` shows


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: a fault, or what is fine, or what could not be measured.

    Attributes:
        what: The fault, or what could not be measured; in ``DoctorReport.looked_at`` the
            name of the check.
        where: The path, or the class of the model.
        evidence: The evidence; of what could not be measured, why.
        remedy: What to do about a fault.
        outcome: ``"fault"``, ``"fine"`` or ``"not measured"``.
    """

    what: str
    where: str
    evidence: str
    remedy: str = ""
    outcome: str = FAULT

    def __str__(self) -> str:
        if not self.remedy:  # a check that was made
            return f"{self.where}: {self.what}: {self.outcome}: {self.evidence}"
        return f"{self.what}: {self.where}: {self.evidence}; {self.remedy}"


Checks = Mapping[str, Callable[[Any], Finding | None]]
"""Checks of one kind of subject, by name; ``None`` of one says that there is nothing to look at."""


def fine(evidence: str) -> Finding:
    """Return the outcome of a check that found no fault."""
    return Finding("", "", evidence, outcome=FINE)


def fault(what: str, evidence: str, remedy: str) -> Finding:
    """Return the outcome of a check that found a fault."""
    return Finding(what, "", evidence, remedy)


def not_measured(what: str, why: str) -> Finding:
    """Return the outcome of a check that could not be made."""
    return Finding(what, "", why, outcome=NOT_MEASURED)


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
            ``evidence``, which is the finding's ``what`` of a fault.
        merge: The measure of the merge, where the base and the adapter were given:
            ``kept`` and ``error`` (parts of the adapter's delta), ``onto`` and
            ``tensors``; else ``None``.
    """

    subject: str
    findings: tuple[Finding, ...]
    not_measured: tuple[str, ...]
    looked_at: tuple[Finding, ...] = ()
    merge: MergeMeasure | None = None

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        findings = few([str(finding) for finding in self.findings])
        # What is fine comes last, where the list is cut.
        checks = sorted(self.looked_at, key=lambda check: check.outcome == FINE)
        looked_at = few([str(check) for check in checks], _MAX_LINES)
        return "\n".join([repr(self), *findings, *looked_at])

    def _brief(self) -> str:
        return f"findings: {len(self.findings)}, not measured: {len(self.not_measured)}, {shown(self.subject)}"


Outcome = tuple[str, str, Finding]
"""The name of a check, the place of its subject, and what it found."""


def examine(checks: Checks, subject: Any, where: str) -> list[Outcome]:
    """Make the checks of a subject."""
    found = [(name, where, check(subject)) for name, check in checks.items()]
    return [(name, where, one) for name, where, one in found if one is not None]


def report(
    subject: str, outcomes: Iterable[Outcome], merge: MergeMeasure | None
) -> DoctorReport:
    """Report the checks that were made, and the merge that was measured."""
    findings = []
    # each once: the checkpoints of a run lack the same
    lacking: dict[str, None] = {}
    looked_at = []
    for name, where, found in outcomes:
        evidence = found.evidence
        if found.outcome == FAULT:
            findings.append(dataclasses.replace(found, where=where))
            evidence = found.what
        elif found.outcome == NOT_MEASURED:
            lacking[f"{found.what}: {evidence}"] = None
        looked_at.append(Finding(name, where, evidence, outcome=found.outcome))

    return DoctorReport(
        subject, tuple(findings), tuple(lacking), tuple(looked_at), merge
    )

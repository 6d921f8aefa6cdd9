"""The report of fastpar.patch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class PatchReport:
    """What patch did; print it. `fallbacks` goes on counting while the model runs."""

    model: str
    # class -> names of the modules; what makes the class faster; when its calls fall back
    replaced: dict[str, list[str]] = field(default_factory=dict)
    does: dict[str, str] = field(default_factory=dict)
    falls_back: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # (class, why) -> names of the modules
    left: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    already: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        n = sum(map(len, self.replaced.values()))
        lines = [f"fastpar.patch({self.model}): {n} modules replaced"]
        if self.already:
            lines[0] += f", {self.already} were before"
        for kind, names in self.replaced.items():
            lines.append(f"  {len(names):>4} {kind}: {self.does[kind]}")
        if self.left:
            lines.append("left as they are:")
        for (kind, why), names in self.left.items():
            shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            lines.append(f"  {len(names):>4} {kind} ({shown}): {why}")
        if self.falls_back:
            lines.append("back to the module's own forward for a call, with one warning, for:")
        for kind, reasons in self.falls_back.items():
            lines += [f"       {kind}: {reason}" for reason in reasons]
        if self.replaced or self.already:
            lines.append("calls that fell back so far:" + ("" if self.fallbacks else " none"))
        lines += [f"  {count:>4} {reason}" for reason, count in self.fallbacks.items()]
        if self.replaced:
            lines.append(
                "dropout in attention and before LayerNorm: torch.manual_seed rules its masks, "
                "which are not torch's"
            )
        return "\n".join(lines)

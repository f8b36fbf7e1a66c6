"""Summaries -> text for a terminal."""

from millstream.console import format_bytes, quoted
from millstream.store.summary import Comparison, FieldSummary, Summary


def show_summary(summary: Summary) -> str:
    """A store on one screen."""
    mean = summary.bytes / summary.records if summary.records else 0
    lines = [
        summary.path,
        f"  {summary.records} records, {summary.shards} shards, {format_bytes(summary.bytes)}"
        f" ({format_bytes(mean)} a record), compression {summary.compression}",
    ]
    if summary.seconds:
        lines.append(f"  written in {summary.seconds:.1f} s")
    if summary.open_shards:
        lines.append(
            f"  {summary.open_shards} shard(s) not sealed: a writer is at work, or: "
            f"millstream repair {quoted(summary.path)}"
        )
    width = max(map(len, summary.fields), default=0)
    lines += ["  fields", *(f"    {name:<{width}}  {_field(field)}" for name, field in summary.fields.items())]
    for example in summary.examples:
        lines.append(f"  record {example['number']} ({example['shard']})")
        shown = {name: value for name, value in example.items() if name not in ("number", "shard")}
        lines += [f"    {name:<{width}}  {_value(value)}" for name, value in shown.items()]
    return "\n".join(lines)


def show_comparison(comparison: Comparison, a: str, b: str) -> str:
    """What matching by id found."""
    lines = [
        f"{a} against {b}, by question_id",
        f"  identical  {comparison.same}",
        f"  different  {comparison.different}",
        f"  only in {a}  {comparison.only_a}",
        f"  only in {b}  {comparison.only_b}",
    ]
    if comparison.different:
        fields = ", ".join(f"{name} ({count})" for name, count in comparison.differing_fields.items())
        lines.append(f"  differing fields: {fields}; first: {', '.join(map(str, comparison.first_different))}")
    return "\n".join(lines)


def _field(field: FieldSummary) -> str:
    parts = [field.kind]
    if field.mean_shape is not None:
        parts.append(f"mean shape [{', '.join(f'{n:g}' for n in field.mean_shape)}]")
    if field.mean is not None:
        parts.append(f"{field.measure} {field.mean:.4g} ({field.min:g} to {field.max:g})")
    if field.nulls:
        parts.append(f"{field.nulls} None")
    return ", ".join(parts)


def _value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:87] + "..."

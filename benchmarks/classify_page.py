"""What `classify.py` measured -> tables and curves in docs/results/reads.md, and which goals are met."""

from collections.abc import Mapping, Sequence

import numpy as np

from measuring import PAGES, Result, update_page

CURVE = PAGES / "classify.svg"
MARK = "<!-- made by benchmarks/classify.py -->"
OURS, PEER = "kmer-exact", "Kraken 2"


def write_page(result: Mapping[str, Result], classes: Sequence[Mapping[str, str]]) -> None:
    """Write everything in place of what was there."""
    ours, peer = result[OURS], result[PEER]
    text = ["## Reads", "", *_goals(ours, peer), "", *_sets(result), "", *_costs(result), "", *_outside(result), ""]
    for rank, key in (("species", "species"), ("genus", "genus")):
        text += [*_by_taxon(ours, peer, rank, [row[key] for row in classes]), ""]
    update_page("reads", MARK, [*text, "![precision against recall](classify.svg)"])
    draw(result)


def recall_at(found: Result, precision: float) -> float:
    """The highest recall at no less than this precision."""
    return max((r for p, r in found["curve"] if p >= precision), default=0.0)


def _goals(ours: Result, peer: Result) -> list[str]:
    a, b = ours["sets"], peer["sets"]
    at = recall_at(a["heldout"], b["heldout"]["precision"])
    cpu = peer["threads_1"]["cpu_s"] / ours["threads_1"]["cpu_s"]
    memory = ours["threads_1"]["bytes"] / peer["threads_1"]["bytes"]
    goals = [
        ("known strains, macro F1", a["known"]["macro_f1"], ">=", b["known"]["macro_f1"]),
        ("held-out strains, recall at Kraken 2's precision", at, ">=", 0.87),
        ("10 kb reads, recall at Kraken 2's precision", recall_at(a["long"], b["long"]["precision"]), ">=",
         b["long"]["recall"]),
        ("random DNA, share of reads classified", a["random"]["classified"] / a["random"]["reads"], "<=",
         b["random"]["classified"] / b["random"]["reads"]),
        ("species left out, share of reads classified", a["outside"]["wrong_of_outside"], "<=",
         b["outside"]["wrong_of_outside"]),
        ("reads per CPU second, of Kraken 2's", cpu, ">=", 3.0),
        ("memory, of Kraken 2's", memory, "<=", 2.0),
    ]  # fmt: skip
    told = {True: list[str](), False: list[str]()}
    for name, value, sign, goal in goals:
        is_met = value >= goal if sign == ">=" else value <= goal
        told[is_met].append(f"{name} {value:.4g} (goal {sign} {goal:.4g})")
    return [
        f"`kmer-exact` from genomes misses {len(told[False])} of {len(goals)} goals: {'; '.join(told[False])}. "
        f"It meets: {'; '.join(told[True])}.",
        "",
        "`python benchmarks/classify.py GENOMES`, whose first lines say what the sets of reads are: 20 species, one "
        "genome of each. kmer-exact and Kraken 2 learn from the genomes, the others from a million simulated reads "
        "(nets: 40,000). Precision, recall and macro F1 are of species, at the default threshold.",
    ]


def _sets(result: Mapping[str, Result]) -> list[str]:
    lines = [
        "| set | classifier | precision | recall | macro F1 | recall at Kraken's precision | recall, `--threshold 0` |",
        "|---|---|---|---|---|---|---|",
    ]
    sets = result[PEER]["sets"]
    for part in (name for name in sets if "curve" in sets[name]):
        for name, row in result.items():
            if "curve" in (found := row["sets"].get(part, {})):
                at = found["recall"] if name == PEER else recall_at(found, sets[part]["precision"])
                cells = (found["precision"], found["recall"], found["macro_f1"], at, found["recall_at_0"])
                lines.append(f"| {part} | {name} | {' | '.join(f'{cell:.4f}' for cell in cells)} |")
    return lines


def _costs(result: Mapping[str, Result]) -> list[str]:
    lines = [
        "500,000 reads of 150 bases, with the start of the command. Memory is that of the process tree; in brackets "
        "are pages of mapped files, libraries among them.",
        "",
        "| classifier | CPU s, 1 thread | 2 threads | memory, MB | training: CPU s | memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result.items():
        cells = [f"{row[key]['cpu_s']:.1f}" if key in row else "–" for key in ("threads_1", "threads_2")]
        cost = row.get("threads_1")
        memory = f"{cost['bytes'] / 1e6:.0f} ({cost['file_bytes'] / 1e6:.0f})" if cost else "–"
        is_built = row["train_cpu_s"] > 1  # now, not by an earlier run
        training = f"{row['train_cpu_s']:.0f} | {row['train_bytes'] / 1e6:,.0f}" if is_built else "– | –"
        lines.append(f"| {name} | {' | '.join(cells)} | {memory} | {training} |")
    return lines


def _outside(result: Mapping[str, Result]) -> list[str]:
    lines = [
        "Reads of four species that were left out of the database, alone and as one in ten (`mixed`), and random DNA:",
        "",
        "| classifier | left out: given a species | right genus | mixed: precision | recall | random: classified |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result.items():
        sets = row["sets"]
        if "outside" in sets:
            out, mixed = sets["outside"], sets["mixed"]
            cells = (out["wrong_of_outside"], out["right_genus"], mixed["precision"], mixed["recall"])
            share = f"{sets['random']['classified']:,} of {sets['random']['reads']:,}"
            lines.append(f"| {name} | {' | '.join(f'{cell:.4f}' for cell in cells)} | {share} |")
    return lines


def _by_taxon(ours: Result, peer: Result, rank: str, names: Sequence[str]) -> list[str]:
    lines = [
        f"By {rank}, on held-out strains:",
        "",
        f"| {rank} | kmer-exact: recall | precision | Kraken 2: recall | precision |",
        "|---|---|---|---|---|",
    ]
    mine, theirs = (row["sets"]["heldout"][rank] for row in (ours, peer))
    for number in mine:
        cells = [f"{value:.4f}" for value in (*mine[number], *theirs.get(number, (0.0, 0.0)))]
        lines.append(f"| {names[int(number)]} | {' | '.join(cells)} |")
    return lines


def draw(result: Mapping[str, Result]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "millstream"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, part in zip(axes, ("known", "heldout"), strict=True):
        for name, row in result.items():
            precision, recall = np.array(row["sets"][part]["curve"]).T
            is_peer = name == PEER
            ax.plot(recall, precision, "k.--" if is_peer else "-", label=name, zorder=3 if is_peer else 2)
        ax.set(title=part, xlabel="recall", ylabel="precision", ylim=(0.8, 1.005))
    axes[0].legend(fontsize=8)
    figure.savefig(CURVE, metadata={"Date": None})

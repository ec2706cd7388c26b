"""Draws the figures of the documentation: docs/figures/*.svg (committed; a test compares them).

python tools/docs_figures.py
"""

import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures"
BLUE, GREEN, RED, GREY, INK = "#4a78b5", "#4d9a5b", "#c2554d", "#d9dde2", "#22272e"


class Figure:
    def __init__(self, width, height, title):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'role="img" font-family="sans-serif" font-size="13">\n<title>{title}</title>\n'
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>\n'
        )
        self.parts = []

    def box(self, x, y, width, height, fill, stroke="none", dashed=False, rx=3):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx}" '
            f'fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def line(self, x1, y1, x2, y2, stroke=INK, width=1.5):
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
            f'stroke-width="{width:g}"/>'
        )

    def text(self, x, y, words, anchor="middle", fill=INK, bold=False, size=13):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
            f"{weight}>{words}</text>"
        )

    def svg(self):
        return self.head + "\n".join(self.parts) + "\n</svg>\n"


def round_timeline():
    """Four steps of a round, the ops of each, and the places of the cache after it."""
    f = Figure(760, 232, "A round of speculative decoding")
    steps = [
        ("1  draft", ["markov_draft,", "expand_tree, ..."]),
        ("2  target pass", ["append_kv,", "verify_attention"]),
        ("3  decide", ["verify_chain,", "verify_tree"]),
        ("4  commit", ["compact_kv (trees),", "next_round"]),
    ]
    # prefix, anchor, drafts: what each step leaves
    prefix = [(GREY, "")] * 3
    states = [
        prefix + [("open", "a"), ("open", "d1"), ("open", "d2"), ("open", "d3")],
        prefix + [(BLUE, "a"), (BLUE, "d1"), (BLUE, "d2"), (BLUE, "d3")],
        prefix + [(BLUE, "a"), (GREEN, "d1"), (GREEN, "d2"), (RED, "d3")],
        prefix + [(GREY, "a"), (GREY, "d1"), (GREY, "d2"), ("open", "y")],
    ]
    for i, ((name, ops), places) in enumerate(zip(steps, states, strict=True)):
        x = 18 + 184 * i
        f.box(x, 16, 172, 84, "#f1f4f8")
        f.text(x + 86, 38, name, bold=True)
        for k, op in enumerate(ops):
            f.text(x + 86, 62 + 20 * k, op, size=12)
        for k, (fill, label) in enumerate(places):
            left = x + 2 + 24 * k
            is_open = fill == "open"
            f.box(left, 122, 22, 26, "#ffffff" if is_open else fill, INK, dashed=is_open)
            dark = fill in (BLUE, GREEN, RED)
            f.text(left + 11, 139, label, fill="#ffffff" if dark else INK, size=11)
    legend = [
        ("open", "no keys and values yet"),
        (BLUE, "written by the pass"),
        (GREEN, "accepted"),
        (RED, "rejected: overwritten by the next pass"),
    ]
    for (fill, words), x in zip(legend, (20, 214, 380, 486), strict=True):
        is_open = fill == "open"
        f.box(x, 170, 14, 14, "#ffffff" if is_open else fill, INK, dashed=is_open)
        f.text(x + 20, 182, words, "start", size=12)
    f.text(20, 214, "a: anchor, the last committed token.  d1..d3: drafts.  y: the target's own "
           "token, the anchor of the next round.", "start", size=12)  # fmt: skip
    return f.svg()


PARENTS = [-1, 0, 0, 1, 1, 2]


def ancestors(node):
    """The node and all above it: the bits of its row in the tree mask."""
    seen = []
    while node >= 0:
        seen.append(node)
        node = PARENTS[node]
    return seen


def tree_mask():
    """A tree of six nodes and its mask, bit j in column j."""
    f = Figure(640, 262, "A draft tree and its mask")
    place = {0: (120, 40), 1: (66, 112), 2: (186, 112), 3: (34, 184), 4: (104, 184), 5: (186, 184)}
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            f.line(*place[parent], *place[node])
    for node, (x, y) in place.items():
        on = node in ancestors(4)
        f.parts.append(
            f'<circle cx="{x}" cy="{y}" r="16" fill="{BLUE if on else GREY}" stroke="{INK}"/>'
        )
        f.text(x, y + 5, str(node), fill="#ffffff" if on else INK)
    f.text(120, 236, "parents = " + str(PARENTS).replace(" ", "&#160;"), size=12)
    left, top, cell = 296, 44, 26
    f.text(left + 3 * cell, 22, "sees row j of its request (bit j)", size=12)
    for j in range(6):
        f.text(left + cell * j + 13, top - 4, str(j), size=12)
    for i in range(6):
        f.text(left - 10, top + cell * i + 18, str(i), "end", size=12)
        for j in range(6):
            on = j in ancestors(i)
            fill = (BLUE if i == 4 else "#9db6d6") if on else "#ffffff"
            f.box(left + cell * j, top + cell * i, cell, cell, fill, INK, rx=0)
        word = sum(1 << j for j in ancestors(i))
        f.text(left + 6 * cell + 16, top + cell * i + 18, f"word 0 = 0b{word:06b} = {word}",
               "start", size=12)  # fmt: skip
    f.text(left - 20, 236, "Row 4 sees the prefix, rows 0 and 1, and itself.", "start", size=12)
    return f.svg()


def residual():
    """p, q, what acceptance keeps of p, and the residual that fills the rest."""
    p, q = [0.40, 0.25, 0.20, 0.15], [0.20, 0.45, 0.10, 0.25]
    f = Figure(640, 262, "Acceptance and residual")
    base, scale, width = 186, 300, 18
    for v, (pv, qv) in enumerate(zip(p, q, strict=True)):
        x = 40 + 62 * v
        f.box(x, base - qv * scale, width, qv * scale, GREY, INK, rx=0)
        f.box(x + 22, base - pv * scale, width, pv * scale, "#ffffff", INK, rx=0)
        kept = min(pv, qv)
        f.box(x + 22, base - kept * scale, width, kept * scale, GREEN, INK, rx=0)
        if pv > qv:
            f.box(x + 22, base - pv * scale, width, (pv - qv) * scale, RED, INK, rx=0)
        f.text(x + 20, base + 18, f"id {v}", size=12)
    f.line(30, base, 290, base)
    f.text(160, 22, "q (grey, the drafter) and p (the target)", size=12)
    rest = [max(pv - qv, 0.0) for pv, qv in zip(p, q, strict=True)]
    mass = sum(rest)
    for v, r in enumerate(rest):
        x = 350 + 62 * v
        height = r / mass * scale * 0.5
        f.box(x + 11, base - height, width, height, RED if r else "#ffffff", INK, rx=0)
        f.text(x + 20, base + 18, f"id {v}", size=12)
        f.text(x + 20, base - height - 6, f"{r / mass:.2f}", size=11)
    f.line(340, base, 600, base)
    f.text(470, 22, "residual (p - q)+, normalised", size=12)
    f.box(40, 220, 14, 14, GREEN, INK)
    f.text(60, 232, f"accepted drafts: min(p, q), {1 - mass:.2f} in all", "start", size=12)
    f.box(350, 220, 14, 14, RED, INK)
    f.text(370, 232, f"drawn after a rejection: {mass:.2f} in all", "start", size=12)
    return f.svg()


FIGURES = {"round": round_timeline, "tree_mask": tree_mask, "residual": residual}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for stem, draw in FIGURES.items():
        (FOLDER / f"{stem}.svg").write_text(draw())

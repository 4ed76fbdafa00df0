"""The look of the report: colours, matplotlib's settings, CSS, and the pieces of HTML that its parts share."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

# Okabe and Ito's colour-blind safe hues, lightened where needed to hold on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b83c6", "#e0702a", "#1c9e78", "#b57bb0", "#8c9196"
COLOURS = {"initial": GREY, "random": PURPLE, "forgetting": ORANGE, "boundary": BLUE, "rare": GREEN}
INK = "#7f7f7e"  # stands for the page's text colour; replaced by currentColor in the SVG
STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coevolve",
    "font.size": 9,
    "text.parse_math": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
CSS = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#24282c;--soft:#666d75;--line:#e3e5e8;
--bad:#c2410c;--good:#12805c;--tint:#f3f5f7}
@media (prefers-color-scheme:dark){:root{--bg:#15181b;--card:#1d2125;--ink:#e4e7ea;--soft:#9aa2aa;
--line:#31373d;--bad:#f0894f;--good:#45c39a;--tint:#262b30}}*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);overflow-wrap:anywhere;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1100px;margin:auto;padding:28px 18px 60px}h1{font-size:27px;line-height:1.25;margin:0 0 6px}
h2{font-size:20px;margin:44px 0 4px}h3{font-size:15px;margin:0}p{margin:4px 0}
.lead{font-size:17px;max-width:52em;margin:10px 0 18px}.soft,.read{color:var(--soft)}.read{font-size:13px}
.grid{display:grid;gap:14px;margin-top:12px;grid-template-columns:
repeat(auto-fit,minmax(min(100%,var(--width,430px)),1fr))}.three{--width:290px}.cards{--width:215px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
.card{break-inside:avoid}.card svg{display:block;width:100%;height:auto;margin:8px 0 2px;color:var(--soft)}
svg text{font-family:inherit!important}.big{font-size:26px;font-weight:650;line-height:1.3}
.missing{border:1px dashed var(--line);border-radius:8px;padding:22px;text-align:center;color:var(--soft)}
.badge{display:inline-block;border-radius:99px;padding:1px 9px;font-size:12px;font-weight:600;color:#fff;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.chain{padding:0 0 0 16px;margin:8px 0 10px;font-size:13px;color:var(--soft)}.chain b{color:var(--ink)}
.user{background:var(--tint);border-radius:12px 12px 12px 3px;padding:7px 12px;margin:10px 0 6px}
code,pre{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;margin:0}
.call{display:block;margin:6px 0 0 14px;padding-left:10px;border-left:3px solid #2b83c6}
.answer{display:block;margin-left:14px;padding:1px 0 3px 10px;border-left:3px solid var(--line)}
.answer{color:var(--soft)}.error{border-color:var(--bad);color:var(--bad)}.good{color:var(--good)}
.bad{color:var(--bad)}summary{cursor:pointer;font-size:13px;color:var(--soft);margin-top:8px}
table{border-collapse:collapse;font-size:13.5px;width:100%;margin-top:6px}td:last-child{text-align:right}
td{padding:3px 0;border-top:1px solid var(--line)}@media print{main{padding:0}h2{break-after:avoid}}
"""


def esc(value: Any) -> str:
    """HTML-safe text; everything that a model, a task or a file says goes through here."""
    return html.escape(str(value), quote=True)


def grid(*cards: str, kind: str = "") -> str:
    """Cards side by side. kind: "cards" (small), "three" (in three columns) or "" (in two)."""
    return f'<div class="grid {kind}">{"".join(cards)}</div>'
